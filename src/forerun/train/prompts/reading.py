"""Texts put together from sentences with random facts, and what readers ask about them.

Each kind of text has a beginning, sentences of which some are taken in order, and questions that its facts answer.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from forerun.train.prompts import words


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of text; entries of `body` are alternatives when a bar separates them."""

    opening: list[str]
    body: list[str]
    questions: list[str]


KINDS = [
    Kind(
        words.items("""
            The {place} swimming pool has new rules; Welcome to the community garden of {place}; Guests of the
            {company} campsite should know the following; Some information for visitors of the {animal} park near
            {place}
        """),
        words.items("""
            It is open from {hour} to {hour2} every day except {day}.|On {day} it stays closed all day.; Adults pay
            {price} dollars, children under {small} get in free.|A season ticket costs {price} dollars.; Dogs are
            welcome on a leash.|Dogs must wait outside.|Pets are not allowed.; Please leave bicycles at the
            gate.|Parking is free for the first {small} hours.; Groups of more than {number} people must call
            {phone} before they come.; Lost things are kept at the desk for {small} weeks.; {name} {surname} is in
            charge and can be reached at {phone}.; Whoever breaks the rules has to leave and pays {price2} dollars.;
            Glass bottles and loud music are forbidden.|Barbecues are allowed near the pond only.; Lockers cost one
            dollar, which you get back.
        """),
        words.items("""
            When is it open?; What does it cost for a family with two small children?; Can I bring my dog?; Whom do
            I call?; I lost my {object} there, what now?; We are {number} people, do we have to tell them?; What
            happens to people who break the rules?; Is it open on {day}?; Where do I leave my bike?
        """),
    ),
    Kind(
        words.items("""
            {animal}s are among the most curious animals of the north; Few people have ever seen a wild {animal};
            The {animal} is smaller than most people think; For a long time the {animal} was hunted for its fur
        """),
        words.items("""
            They live in groups of up to {small}.|They live alone and meet only in {month}.; A grown one weighs
            about {number} kilograms.; The young are born in {month}, usually {small} at a time.|The female has one
            young a year.; They eat mostly {food} and insects.|They hunt at night and sleep in hollow trees.; In
            winter they lose a third of their weight.|In winter they dig through the snow for food.; They warn each
            other with a short whistle.|They mark stones with their scent.; In {oldyear} there were only {number}
            left.; Today about {number2} thousand live in the wild.; Their greatest enemy is the eagle.|They have
            few enemies besides cars.; Scientists from {place} have followed {small} of them with cameras.; They can
            live for {number} years.
        """),
        words.items("""
            What do they eat?; How do they get through the winter?; How many are left?; Who are their enemies?; When
            are the young born and how many are there?; How do they talk to each other?; Do they live alone?; How do
            the scientists study them, and where are they from?; Why is the animal rare?
        """),
    ),
    Kind(
        words.items("""
            {name} {surname} was born in {place} in {year}; Hardly anyone remembers {name} {surname} today; The
            inventor {name} {surname} grew up on a farm near {place}; {name} {surname} never wanted to be famous
        """),
        words.items("""
            At the age of {number} {they} left school to work for {company}.|{They} studied in {place2} and was bad
            at everything except drawing.; {They} built the first {object} out of wood and wire.|{They} wrote
            {small} books about {topic}.; In {year2} {they} married {name2}, a doctor.; The first {small} attempts
            failed.|At first nobody wanted to pay for it.; A newspaper called {them} the greatest mind of {place2}.;
            {They} lost everything in a fire and began again.; {They} gave most of the money to a school for girls.;
            {They} died {number} years later, {animal} enthusiast to the end.; A street in {place} is named after
            {them}.; {They} used to say that patience is worth more than talent.; A museum shows {small} of {their}
            letters to {name2}.
        """),
        words.items("""
            Who was {name} {surname}?; What did this person make?; Where did all this happen?; Whom did this person
            marry?; What went wrong?; What happened to the money?; How is the person remembered today?; How old was
            the person when school ended?; What kind of person was this? Give evidence.
        """),
    ),
    Kind(
        words.items("""
            A power cut left {number} thousand homes in {place} dark on {day}; A truck lost its load of {food} on
            the road to {place} on {day} morning; {number} people were stuck in a cable car near {place} on {day};
            The old market hall of {place} reopened on {day}; A {animal} kept the police of {place} busy on {day}
        """),
        words.items("""
            It began at {hour} and lasted {small} hours.|By {hour2} everything was over.; Nobody was
            injured.|{small} people were slightly injured.; "I have never seen anything like it," said {name}
            {surname}, who lives nearby.; The fire department came with {number} people.|Neighbors helped with tea
            and blankets.; The damage is put at {number2} thousand dollars.; The mayor thanked everyone who
            helped.|The mayor promised to look into it.; Experts blame an old cable.|The cause is still unknown.;
            Schools stayed closed until {day2}.|The road was closed until {day2}.; Something similar had happened in
            {year2}.; A fund has been set up at {company}.
        """),
        words.items("""
            What happened, where and when?; Was anyone hurt?; What was the cause?; Who helped?; How long did it
            last?; How large is the damage?; Has it happened before?; What does {name} {surname} say?; What is still
            closed?
        """),
    ),
    Kind(
        words.items("""
            Hi {name}, a few things before I go on holiday; Dear team, here is where we stand with the {topic}
            project; Hello everyone, some news from the {place} office; Dear parents of class {small}, our trip to
            {place} is near
        """),
        words.items("""
            {name2} will take over my tasks until {date}.|Please send all questions to {name2}.; The offer from
            {company} is {price} dollars cheaper than the old one.; We have sold {number} {object}s so far,
            {number2} fewer than planned.; The {object} in room {number} is broken, {name3} has ordered a new one.;
            The deadline is {date}.|We have moved the deadline to {date}.; I still need the list from
            {name3}.|{name3} has not answered yet.; The bus leaves at {hour} and returns around {hour2}.|We meet at
            {hour} at the station.; Everyone needs {food}, a drink and a {object}.|Lunch is included.; The budget is
            nearly used up.|There are {number} dollars left.; If anything burns, call me at {phone}.; Thanks for
            your patience, {name4}|See you on {day}, {name4}|Best, {name4}
        """),
        words.items("""
            What do I have to do?; Who is responsible for what?; What is the deadline?; What is broken and who takes
            care of it?; Who wrote this, and to whom?; What is still missing?; When do they come back?; What does
            the writer worry about?; How are sales going?; Which number can I call?
        """),
    ),
    Kind(
        words.items("""
            I used to think that {topic} was only for experts; For {small} years I have lived without a {object};
            People keep telling me that I should {wish}; My grandmother never owned a {object}; Last {month} I sold
            my {object}
        """),
        words.items("""
            At first it felt strange.|In the beginning I made every mistake one can make.; Friends laughed at
            me.|{name}, my oldest friend, called it madness.; After {small} weeks I slept better.|After {small}
            months I hardly noticed the difference.; I saved about {price} dollars.|It cost me {price} dollars and a
            lot of nerves.; There are bad days, of course.|Some evenings I miss it.; What surprised me most was how
            much time I had.|What surprised me most was how little I had known.; I do not believe that it suits
            everybody.|I think everyone should try it once.; My children see it differently.; Would I do it again?
            Probably.|Would I do it again? Only with help.
        """),
        words.items("""
            What is the author's opinion?; What changed for the author?; What did friends think?; What are the good
            and the bad sides?; What surprised the author?; Would the author recommend it?; What is the tone of this
            text?
        """),
    ),
    Kind(
        words.items("""
            {topic} is older than most people believe; There are three things to know about {topic}; When {food}
            first came to {place}, nobody wanted it; The story of the {object} begins in {place}; {food} was once a
            food of the poor
        """),
        words.items("""
            In {oldyear} a merchant brought it across the sea.|The first mention is in a letter from {oldyear}.; It
            was expensive, and only the rich could afford it.|It was so common that nobody wrote about it.; Doctors
            recommended it against headaches.|Priests preached against it.; Then a machine changed everything: what
            took {number} days now took {small}.; Prices fell by half within {small} years.; During the war it was
            hard to get.|The war brought a second boom.; Today most of it comes from {place2}.|Today {number}
            companies make it.; Whether this will last is an open question.|Experts expect demand to double by
            2040.; The climate is the greatest risk.|The greatest problem is waste.; Small makers are coming back,
            though.
        """),
        words.items("""
            Why did the prices fall?; How did it begin?; What did doctors or priests think?; What are the key
            points?; Where does it come from today?; What are the risks?; What was different during the war?; What
            does the text expect for the future?
        """),
    ),
    Kind(
        words.items("""
            Every evening {name} the baker put a light in the window; {name} had a {animal} that could count; At the
            edge of the forest near {place} stood a house without a door; On the last day of {month} the sea was
            gone
        """),
        words.items("""
            Nobody knew why.|The children said it was magic.; One night a stranger knocked and asked for {food}.|One
            night the wind carried a {object} to the doorstep.; "{Wish}," said the voice, "and you will see.";
            {name} thought about it for {small} days.|{name} did not sleep that night.; The neighbors shook their
            heads.|The mayor sent {small} soldiers.; In the morning there were footprints in the snow, but only
            leading away.; An old woman laughed and said nothing.; Then it began to rain, and it rained for {number}
            days.; When {name} came back, everything was smaller.|When it was over, {name} had grown old.; Since
            then the light has never gone out.|And that is why the bell rings {small} times at noon.
        """),
        words.items("""
            What happens in this story?; Who is the main character?; What is the moral?; Why do you think it ended
            like this?; How could the story go on?; What is strange about it?; What would be a good title, and why?
        """),
    ),
]
ASKED = [
    "{text}\n\n{question}",
    "{question}\n\n{text}",
    "{question} Here is the text:\n\n{text}",
    "{text}\n\nMy question: {question}",
    "Read the text and answer the question.\n\nText: {text}\n\nQuestion: {question}",
    '"{text}"\n\n{question} Quote the sentence that says so.',
    "{text}\n\n{question} And one more thing: {question2}",
    "Answer with the help of the text below: {question}\n\n{text}",
    "{text}\n\n{question} Explain briefly.",
    "1. {question}\n2. {question2}\n3. {question3}\n\n{text}",
]
OTHER = [
    "{text}\n\nIn short?",
    "Summarize this for someone in a hurry:\n\n{text}",
    "Sum up the text in two or three sentences.\n\n{text}",
    "{text}\n\nWrite a summary in your own words.",
    "What should I remember from this?\n\n{text}",
    "Reduce this to the essentials, as bullet points:\n\n{text}",
    "Boil this down to a single sentence: {text}",
    "Explain the text to a child.\n\n{text}",
    "Write a headline for this.\n\n{text}",
    "Turn the text into a list of facts.\n\n{text}",
    "Which names, times and amounts of money does the text mention?\n\n{text}",
    "Put the facts of this text into a table with two columns.\n\n{text}",
    "Give me the facts as JSON.\n\n{text}",
    "List what speaks for and against, according to this text.\n\n{text}",
    "Write a reply to this:\n\n{text}",
    "Retell this from the point of view of someone else:\n\n{text}",
    "{text}\n\nWrite the next paragraph.",
]
ANIMALS = words.items("otter; marten; badger; lynx; beaver; hare; fox; goat; stork; hedgehog; seal; donkey; raccoon")
DAYS = words.items("Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday")
MONTHS = words.items("January; February; March; April; May; June; July; August; September; October; November")


def reading_prompt(chance: random.Random) -> str:
    """A text nobody has read before, and a task on it."""
    kind = chance.choice(KINDS)
    facts = _facts(chance)
    count = chance.randint(3, min(8, len(kind.body)))
    taken = sorted(chance.sample(range(len(kind.body)), count))
    sentences = [chance.choice(kind.body[place].split("|")) for place in taken]
    text = _filled(" ".join([chance.choice(kind.opening) + ".", *sentences]), facts)
    text = text[0].upper() + text[1:]
    asks = dict(zip(("question", "question2", "question3"), chance.sample(kind.questions, 3), strict=True))
    asks = {name: _filled(question, facts) for name, question in asks.items()}
    return _filled(chance.choice(ASKED if chance.random() < 0.6 else OTHER), asks | {"text": text})


def _filled(template: str, facts: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: facts[found[1]], template)


def _facts(chance: random.Random) -> dict[str, str]:
    """What fills the blanks of one text, the same in its questions."""
    names = chance.sample([name for name in words.NAMES if " " not in name], 4)
    days = chance.sample(DAYS, 2)
    places = chance.sample(words.PLACES, 2)
    they, them, their = chance.choice((("he", "him", "his"), ("she", "her", "her")))
    wish = chance.choice(words.WISHES)
    facts = {"name": names[0], "name2": names[1], "name3": names[2], "name4": names[3], "day": days[0], "day2": days[1]}
    facts |= {"place": places[0], "place2": places[1], "they": they, "them": them, "their": their}
    facts |= {"They": they.title(), "wish": wish, "Wish": wish[0].upper() + wish[1:]}
    lists = {"surname": words.SURNAMES, "company": words.COMPANIES, "topic": words.TOPICS, "object": words.OBJECTS}
    lists |= {"food": words.FOODS, "animal": ANIMALS, "month": MONTHS}
    facts |= {name: chance.choice(entries) for name, entries in lists.items()}
    facts |= {
        "hour": f"{chance.randint(6, 11)}:{chance.choice(('00', '15', '30'))}",
        "hour2": f"{chance.randint(13, 22)}:00",
    }
    facts |= {"date": f"{chance.randint(1, 28)} {chance.choice(MONTHS)}", "phone": f"555-{chance.randint(1000, 9999)}"}
    spans = {"year": (1880, 1930), "year2": (1931, 2015), "oldyear": (1400, 1870), "small": (2, 9), "number": (10, 60)}
    spans |= {"number2": (12, 95), "price": (4, 60), "price2": (20, 200)}
    return facts | {name: str(chance.randint(low, high)) for name, (low, high) in spans.items()}
