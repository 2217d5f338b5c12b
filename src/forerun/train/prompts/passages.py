"""Passages wrapped as tasks: summaries, questions, extraction, translation, editing.

The passages are notices, mails and reports with random facts filled in, Python's own documentation (PSF licence), and
texts that the model has written itself.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from forerun.train.prompts import words
from forerun.train.prompts.templates import fill

NOTICES = [
    "{name} {surname} joined {company} in {year} as a junior analyst. After {small} years in the {place} office"
    " {they} moved to {place2}, where {they} now leads a team of {number}. Colleagues describe {them} as calm "
    "and precise. In {year2} the team won the company's prize for its work on {topic}.",
    "Dear {name}, thank you for your order of {date}. We have shipped one {object} and {small} {object2}s to "
    "your address in {place}. The order number is {code}. The total is ${price}. Delivery takes {small2} "
    "working days. If something is missing, please write to help@{domain}.com or call {phone}. Kind regards, "
    "{company}",
    "The town council of {place} has voted to close the old bridge for repairs from {date} to {date2}. Buses 12"
    " and 40 will take another route through the station district. Repairs are expected to cost {number} "
    "million dollars, of which the state pays half. Shop owners near the bridge fear that they will lose "
    "customers. Mayor {surname} said the city would offer free parking during the works.",
    "{company} announced on {date} that it will open a new store in {place}. The store will have {number} "
    'employees and sell everything from {object}s to {object2}s. "We have wanted to come to {place} for years,"'
    " said {name} {surname}, who will run it. The company made a profit of {number2} million dollars last year,"
    " {small} percent more than the year before.",
    "Meeting notes, {date}. Present: {name}, {name2}, {name3}. 1. {name} reported on {topic}; the first results"
    " are good, but the budget is nearly used up. 2. {name2} will ask {company} for a new offer by {date2}. 3. "
    "The trip to {place} is postponed. 4. {name3} needs help with the slides. Next meeting: Tuesday at {hour} "
    "in room {number}.",
    "Welcome to the {place} {topic} Museum. We are open Tuesday to Sunday from {hour} to 18:00. Tickets cost "
    "${small} for adults and are free for children under {small2}. Guided tours start at {hour2} and last about"
    " {number} minutes. Bags larger than a sheet of paper must be left in the lockers. Photography is allowed "
    "without flash. The cafe on the second floor serves soup with {food} and fresh cake.",
    "I bought this {object} from {company} about {small} weeks ago. The quality is good for the price and it "
    "looks exactly like the pictures. However, it arrived {small2} days late and one part was scratched. I "
    "called customer service and {name} was very kind and sent a replacement at once. All in all I would buy it"
    " again, but I would not pay more than ${price}.",
    "Hi {name}, it's {name2}. Are you free on {date}? {name3} and I want to go to {place} for the weekend and "
    "we still have a seat in the car. We would leave at {hour} and be back on Sunday night. The hotel is "
    "${price} for two nights. Bring a warm jacket and your {object}! Let me know by Wednesday, my number is "
    "{phone}.",
    "Researchers in {place} have followed {number} adults for {small} years to find out how {topic} affects "
    'sleep. Those who spent more than {small2} hours a week on it slept on average {number2} minutes less. "The'
    ' effect is small but clear," says {name} {surname}, who led the study. Critics point out that people '
    "reported their sleep themselves. A larger study is planned for {year2}.",
    "The {object} has three buttons. Press the left button for two seconds to switch it on; the light turns "
    "green. Press the right button to change the mode. If the light blinks red, the battery is low: charge it "
    "for {small} hours with the cable in the box. Do not use it near water. To reset it, press all buttons for "
    "{small2} seconds. The warranty lasts {small} years. Model {code}, made by {company}.",
    "{place} lies on a river about {number} kilometers from the coast. Around {number2} thousand people live "
    "there. It was founded in {oldyear} by merchants who traded in {food} and wool. A fire destroyed most of "
    "the center in {oldyear2}, and it was rebuilt in stone. Today the town lives from tourism and from a "
    "factory that makes {object}s. Every {month} there is a festival with music and {food2}.",
    "For the {food} soup, chop two onions and {small} cloves of garlic and fry them in oil for {small2} "
    "minutes. Add {number} grams of {food}, {food2} cut into cubes, and a liter of stock. Simmer for {number2} "
    "minutes. Season with salt, pepper and a little lemon. Serve with bread. The soup keeps for three days in "
    "the fridge and freezes well. It makes {small} portions.",
    "Position: {topic} specialist at {company}, {place}. Salary: ${number},000 a year. We look for someone with"
    " at least {small} years of experience, good {language} and a driving licence. You will plan projects, talk"
    " to customers and train new colleagues. We offer {number2} days of holiday, flexible hours and a modern "
    "office near the station. Send your application to {name} {surname} ({email}) by {date}.",
    "Patient: {name} {surname}, born {olddate}. Visit on {date}. Complaint: headaches for {small} weeks, worse "
    "in the morning. Blood pressure {pressure}. Sleeps about {small2} hours. No fever. Works long hours at a "
    "screen. Advice: more breaks, drink more water, eye test. Prescribed: {number}0 mg of ibuprofen when "
    "needed, at most three times a day. Next visit in {small} weeks.",
    "Long ago, in a village near {place}, there lived a baker called {name}. Every morning {they} gave the "
    "first bread of the day to an old woman who could not pay. One winter the oven broke, and {name} had no "
    "money to repair it. The old woman came, put her hand on the stones, and the oven was warm again. From that"
    " day on it never went out, and people came from as far as {place2} to buy the bread.",
    "Flight {code} from {place} to {place2} on {date} departs at {hour} from gate {letter}{small}. Boarding "
    "begins {number} minutes before departure. {name} {surname}, seat {small2}{letter}. One piece of hand "
    "luggage of up to 8 kg is included; a suitcase costs ${small} extra. Because of strong winds a delay of "
    "about {number2} minutes is expected.",
]
SUMMARY_TASKS = [
    "Summarize the following text in one sentence.\n\n{passage}",
    "Summarize this in three bullet points:\n\n{passage}",
    "{passage}\n\nTL;DR?",
    "Give me a short summary of this text:\n{passage}",
    "What is the main point of this text?\n\n{passage}",
    "Write a title for this text.\n\n{passage}",
    "Shorten the following text to about half its length:\n\n{passage}",
    "Explain the following to {audience}:\n\n{passage}",
    "can you summarise this for me\n\n{passage}",
    'Read the text below and write a brief summary in your own words.\n\n"{passage}"',
]
EXTRACT_TASKS = [
    "Extract all names and places from the text as a list.\n\n{passage}",
    "Extract the key facts from this text as JSON with sensible keys:\n\n{passage}",
    "{passage}\n\nList every number in the text and what it means.",
    "Make a table with the most important facts from this text:\n\n{passage}",
    "Which dates, people and organizations are mentioned?\n\nText: {passage}",
    'Return a JSON object with the fields "people", "places", "dates" and "topics" for this text.\n\n{passage}',
    "Find all keywords in the following text.\n\n{passage}",
    "Pull out the action items or next steps, if there are any:\n\n{passage}",
    "Classify the text below as news, email, review, instruction, story or other, and say why.\n\n{passage}",
]
QUESTION_TASKS = [
    "{passage}\n\nQuestion: {question}",
    "Answer using only the text below.\n\n{passage}\n\n{question}",
    "Context: {passage}\n\nQuestion: {question}\nAnswer:",
    "Read this and tell me: {question}\n\n{passage}",
    "Here is a text:\n\n{passage}\n\nBased on it, {question}",
    "Write three questions with answers about this text:\n\n{passage}",
    "{passage}\n\nIs there anything unclear or missing in this text?",
]
QUESTIONS = [
    "who is mentioned and what do they do?",
    "what happened, and when?",
    "what should the reader do next?",
    "why does this matter?",
    "what is it about?",
    "what are the most important details?",
    "how much does it cost or how many are there?",
    "where does it take place?",
    "what problem is described and how is it solved?",
    "what is the first thing that is said, and what is the last?",
    "what would you ask the author?",
    "how long does it take?",
]
EDIT_TASKS = [
    "Translate the following text into {language}:\n\n{passage}",
    "Translate to {language}.\n\n{passage}",
    "Rewrite this text in a {tone} tone:\n\n{passage}",
    "Proofread this text and return the corrected version:\n\n{passage}",
    "Rewrite the text below in simple words, for {audience}.\n\n{passage}",
    "Turn this text into a short email:\n\n{passage}",
    "Repeat the text word for word, but put every sentence on its own line:\n\n{passage}",
    "Rewrite this as a dialogue between two people:\n\n{passage}",
    "Change the text to the present tense:\n\n{passage}",
    "Continue this text:\n\n{passage}",
]
CODE_TASKS = [
    "Explain what this code does:\n\n```python\n{passage}\n```",
    "Add type hints to this function:\n\n```python\n{passage}\n```",
    "Write a docstring for this Python function:\n\n{passage}",
    "Rename the variables so that the code is easier to read:\n\n```python\n{passage}\n```",
    "```python\n{passage}\n```\n\nWrite unit tests for this.",
    "Is there a bug in this code?\n\n```python\n{passage}\n```",
    "Rewrite this in JavaScript:\n\n```python\n{passage}\n```",
    "Add comments to each line:\n\n```python\n{passage}\n```",
    "Refactor this code to make it shorter:\n\n```python\n{passage}\n```",
    "Add error handling to this function and show the whole function:\n\n```python\n{passage}\n```",
    "what is the time complexity of this?\n\n{passage}",
]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]


def notice(random: random.Random) -> str:
    """A passage with facts that nobody has read before."""
    return _fill_facts(random.choice(NOTICES), random)


def _fill_facts(text: str, random: random.Random) -> str:
    they, them = random.choice([("he", "him"), ("she", "her")])

    def date() -> str:
        return f"{random.randint(1, 28)} {random.choice(MONTHS)}"

    def first_name() -> str:
        return random.choice([name for name in words.NAMES if " " not in name])

    facts = {
        "name": first_name(),
        "name2": first_name(),
        "name3": first_name(),
        "surname": random.choice(words.SURNAMES),
        "company": random.choice(words.COMPANIES),
        "place": random.choice(words.PLACES),
        "place2": random.choice(words.PLACES),
        "topic": random.choice(words.TOPICS),
        "object": random.choice(words.OBJECTS),
        "object2": random.choice(words.OBJECTS),
        "food": random.choice(words.FOODS),
        "food2": random.choice(words.FOODS),
        "language": random.choice(words.LANGUAGES),
        "date": date(),
        "date2": date(),
        "olddate": f"{date()} {random.randint(1940, 2005)}",
        "month": random.choice(MONTHS),
        "year": str(random.randint(1985, 2012)),
        "year2": str(random.randint(2013, 2027)),
        "oldyear": str(random.randint(1100, 1600)),
        "oldyear2": str(random.randint(1601, 1900)),
        "small": str(random.randint(2, 9)),
        "small2": str(random.randint(3, 12)),
        "number": str(random.randint(12, 90)),
        "number2": str(random.randint(10, 60)),
        "price": f"{random.randint(15, 400)}.{random.choice(['00', '50', '95', '99'])}",
        "code": f"{random.choice('ABCDEFGHKLM')}{random.choice('NPRSTUVX')}{random.randint(100, 9999)}",
        "phone": f"555-{random.randint(1000, 9999)}",
        "hour": f"{random.randint(7, 11)}:{random.choice(['00', '15', '30', '45'])}",
        "hour2": f"{random.randint(13, 17)}:{random.choice(['00', '30'])}",
        "letter": random.choice("ABCDEF"),
        "pressure": f"{random.randint(105, 160)}/{random.randint(65, 100)}",
        "they": they,
        "them": them,
    }
    facts["domain"] = re.sub(r"[^a-z]", "", facts["company"].lower())
    facts["email"] = f"{facts['surname'].lower()}@{facts['domain']}.com"
    return re.sub(r"\{(\w+)\}", lambda found: facts[found[1]], text)


def passage_prompt(passage: str, random: random.Random) -> str:
    """The passage as a task."""
    tasks = random.choices(
        (SUMMARY_TASKS, EXTRACT_TASKS, QUESTION_TASKS, EDIT_TASKS), weights=(0.26, 0.22, 0.28, 0.24)
    )[0]
    template = random.choice(tasks).replace("{question}", random.choice(QUESTIONS))
    before, after = template.split("{passage}")
    wrapped = [fill(part, random) if "{" in part else part for part in (before, after)]  # not the passage's braces
    return wrapped[0] + passage + wrapped[1]


def code_prompt(source: str, random: random.Random) -> str:
    """A piece of code as a task."""
    return random.choice(CODE_TASKS).replace("{passage}", source)


def excerpt(paragraphs: Sequence[str], random: random.Random, most: int = 1400) -> str:
    """A few paragraphs in a row, at most so many characters."""
    start = random.randrange(len(paragraphs))
    wanted = random.choice((300, 500, 700, 1000, most))
    text = paragraphs[start]
    for paragraph in paragraphs[start + 1 :]:
        if len(text) + len(paragraph) > wanted:
            break
        text += "\n\n" + paragraph
    return text[:most]
