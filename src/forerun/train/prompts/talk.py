"""Messages of people who chat: small talk, advice, opinions, plans; several sentences, with the details of a life."""

from __future__ import annotations

import random
import re

from forerun.train.prompts import words
from forerun.train.prompts.templates import casual

WHO = words.items("""
    my sister; my brother; my boss; my best friend; my roommate; my neighbor; my mom; my dad; my wife; my husband;
    my girlfriend; my boyfriend; my teenage son; my daughter; my grandpa; a coworker; my landlord; my aunt; my cousin;
    my mother-in-law; an old classmate; my teacher; a friend from college; the guy next door; my ex
""")
DID = words.items("""
    borrowed my {object} and never gave it back; wants me to come along to {place}; keeps asking me about {topic};
    has stopped talking to me; told everyone about my plan to {wish}; is turning {age} soon; just got a new job at
    {company}; asked me to lend them {money} dollars; wants to {wish} and needs my help; forgot my birthday again;
    is moving to {place} next month; thinks {topic} is a waste of time; invited me to a party where I know nobody;
    is always late; gave me a {object} that I don't like; broke my {object} and pretends it wasn't them; talks about
    nothing but {topic}; asked me what I really think of their cooking; cancelled our trip to {place} at the last
    minute; is having a hard time at work; got a puppy without asking me; made fun of me in front of everyone; says
    I should {wish}; wants to visit us for three weeks; wrote me a very long letter; keeps sending me articles on
    {topic}
""")
FEEL = words.items("""
    I don't know what to say; I'm a bit annoyed; I feel bad about it; I'm happy for them but also a little jealous;
    I can't stop thinking about it; I don't want to hurt anyone; I'd like to stay friends; I'm not sure I'm
    overreacting; it really stresses me out; I laughed it off but it hurt; I have to decide until {day}; I'm worried;
    honestly I'm tired of it; I want to do the right thing; it made me smile; I need a second opinion
""")
ASK = words.items("""
    What would you do?; How should I bring it up?; Any ideas?; what do you think; Am I wrong here?; How do I say no?;
    Can you help me find the right words?; Is that normal?; What are my options?; should I say something; Please be
    honest.; How can I make it up to them?; What's a kind way to answer?; Give me some perspective.; Thoughts?
""")
ABOUT_ME = words.items("""
    I'm {age} and I work as a {job}; I live in {place} with {who}; I have about {small} hours a week; I'm on a tight
    budget; I've never done anything like this before; I have two left hands; I'm a vegetarian; I work night shifts;
    I'm a student; I just moved here from {place}; I have a bad knee; I'm rather shy; I have three kids; I'm
    retired; I work from home; I get bored quickly; I hate mornings; I'm pretty busy until {day}; I have a small
    garden; I don't own a car; I have {money} dollars to spend; I already tried it once and gave up; I love {topic};
    I'm new to this
""")
GOALS = words.items("""
    Is it realistic to {wish} in {small} months?; How do I start if I want to {wish}?; Help me {wish}.; I want to
    {wish}, where do I begin?; What should I pay attention to when I {wish}?; Can you make a simple plan so that I
    can {wish}?; what do people usually get wrong when they {wish}; Which {object} should I get?; Would {topic} be a
    good hobby for me?; Can you suggest something to do in {place}?; what should I cook with {food} tonight; What's a
    good present for {who}?; How do I get better at {topic}?; Could I make a living with {topic}?; Do I need a
    {object} for that?; How do I explain {topic} to {who}?; What can I talk about with {who} at dinner?; Recommend me
    a book or two.; How do I stay motivated?; what should I do this weekend; Can you plan my {day}?; Motivate me!
""")
OPINIONS = words.items("""
    Is it okay to skip {event}?; What's your opinion on {topic}?; Do you prefer {place} or {place2}?; be honest, is
    {topic} overrated; Should children learn about {topic} at school?; What makes a good {job}?; Is a {object} worth
    the money?; Do you think {who} will like a {object}?; Would you rather live in {place} or in {place2}, and why?;
    Why do people care so much about {topic}?; Is {food} healthy or not?; Do opposites really attract?; Are cats
    smarter than dogs?; Can money buy happiness?; Is it rude to leave {event} early?; What's the point of {topic}?;
    Which is the better pet, a parrot or a rabbit?; Is it too late to become a {job} at {age}?; what's the most
    useful thing a {job} ever invented; Do I have to bring something to {event}?; Are you ever wrong?; How would the
    world look without {topic}?; Is {food} with {food2} a crime?; Should I trust {who} with my {object}?
""")
SMALL_TALK = words.items("""
    hey, how's it going?; Good evening! What can you do for me?; I just got home from work and I'm exhausted.; guess
    what, I finally managed to {wish}!; It's raining again in {place}. Cheer me up.; tell me something nice; I can't
    sleep. Talk to me about {topic}.; do you know {place}? I'm going there on {day}; I'm bored, entertain me; thank
    you, you're great; What did you think of my idea to {wish}?; I made soup with {food} and {food2} and it was
    awful, lol; My {object} broke today. Just my luck.; Who are you and where do you come from?; ok I have {small}
    minutes, teach me something about {topic}; I passed my exam!!!; Happy {day}!; do you ever get tired of questions;
    I'm having coffee with {who} in ten minutes. Give me something to talk about.; My {pet} is staring at me. What
    does it want?; I had a strange dream about {topic} last night.; let's play a game; I'm nervous about {event}.
""")
CREATIVE = words.items("""
    Come up with a name for my {pet}. It is {trait}, {trait2} and loves {food}.; Write a message to {who}: I can't
    come to {event} because I have to {wish}.; Think of a funny excuse for missing {event}.; Invent a drink called
    "{place} {object}".; Give me five names for a shop that sells {object}s and {food}.; Write a short birthday wish
    for {who}, who is {trait} and likes {topic}.; Imagine you are {role}. How was your day?; You are {role} and I am
    a {job}. Start the conversation.; Describe {place} as {role} would.; Write a status update about {event}.; Make
    up a story about a {trait} {pet} in {place}.; What would {role} say about {topic}?; Write a note to leave on the
    {object} for {who}.; Describe a {object} to someone who has never seen one.; Give my {pet} a voice: what does it
    think about {event}?; Write an invitation to {event} in {place}, {day} evening.; Plan {event} for {age} people.
    We have {money} dollars.; Make a checklist for {event}.; Make a shopping list for {small} days with {food} and
    {food2}.; Give me three conversation starters for {event}.
""")
BLANKS = {
    "object": words.OBJECTS,
    "topic": words.TOPICS,
    "place": words.PLACES,
    "place2": words.PLACES,
    "food": words.FOODS,
    "food2": words.FOODS,
    "wish": words.WISHES,
    "company": words.COMPANIES,
    "role": words.ROLES,
    "who": WHO,
    "job": words.items("""
        nurse; bus driver; teacher; programmer; carpenter; waiter; cook; lawyer; dentist; baker; journalist; gardener;
        musician; plumber; cashier; pilot; librarian; firefighter; electrician; photographer; accountant
    """),
    "event": words.items("""
        a wedding; a baby shower; the office party; a family dinner; a school reunion; a housewarming; a funeral; a
        costume party; my graduation; a barbecue; a job interview; a blind date; a picnic; a game night; the parents'
        evening; a concert; a farewell party; the marathon; a job fair; a garden party
    """),
    "pet": words.items("cat; puppy; parrot; turtle; hamster; goldfish; old dog; rabbit; pony; kitten"),
    "trait": words.items("shy; brave; lazy; curious; clumsy; proud; tiny; grumpy; clever; noisy; gentle; hungry"),
    "day": words.items("Monday; Tuesday; Friday; Saturday; Sunday; Thursday"),
}
BLANKS["trait2"] = BLANKS["trait"]


def talk_prompt(chance: random.Random) -> str:
    """One message of someone who wants to talk."""
    kind = chance.choices(("trouble", "goal", "opinion", "small", "creative"), weights=(30, 28, 14, 10, 18))[0]
    if kind == "trouble":
        told = [f"{chance.choice(WHO)} {chance.choice(DID)}", chance.choice(FEEL)]
        if chance.random() < 0.4:
            told.insert(chance.randint(0, 1), chance.choice(ABOUT_ME))
        text = f"{_joined(told, chance)} {chance.choice(ASK)}"
    elif kind == "goal":
        about = chance.sample(ABOUT_ME, chance.choice((0, 1, 1, 2, 2)))
        question = chance.choice(GOALS)
        text = question if not about else f"{_joined(about, chance)} {question}"
        if about and chance.random() < 0.25:
            text = f"{question} {_joined(about, chance)}"
    elif kind == "opinion":
        text = chance.choice(OPINIONS)
    else:
        text = chance.choice(SMALL_TALK if kind == "small" else CREATIVE)
    filled = _filled(text, chance)
    if kind in ("trouble", "goal") and filled[0].islower() and chance.random() < 0.75:
        filled = filled[0].upper() + filled[1:]
    return casual(filled, chance)


def _joined(parts: list[str], chance: random.Random) -> str:
    """Two or three remarks as one or more sentences."""
    if len(parts) == 2 and chance.random() < 0.4:
        return f"{parts[0]} {chance.choice(('and', 'but', 'and now'))} {parts[1]}."
    return " ".join(f"{part if number == 0 else part[0].upper() + part[1:]}." for number, part in enumerate(parts))


def _filled(template: str, chance: random.Random) -> str:
    """Twice, since a blank may bring another one."""
    numbers = {
        "age": lambda: chance.randint(18, 74),
        "small": lambda: chance.randint(2, 9),
        "money": lambda: 20 * chance.randint(1, 40),
    }

    def blank(found: re.Match[str]) -> str:
        name = found[1]
        return str(numbers[name]()) if name in numbers else chance.choice(BLANKS[name])

    return re.sub(r"\{(\w+)\}", blank, re.sub(r"\{(\w+)\}", blank, template))
