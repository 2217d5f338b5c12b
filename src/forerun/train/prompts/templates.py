"""Prompts from templates: the kinds of things people type, with topics, names and numbers filled in."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from forerun.train.prompts import words

BLANKS = {
    "topic": words.TOPICS,
    "other": words.TOPICS,
    "place": words.PLACES,
    "name": words.NAMES,
    "person": words.NAMES,
    "company": words.COMPANIES,
    "object": words.OBJECTS,
    "food": words.FOODS,
    "food2": words.FOODS,
    "food3": words.FOODS,
    "language": words.LANGUAGES,
    "code": words.PROGRAMMING,
    "audience": words.AUDIENCES,
    "tone": words.TONES,
    "role": words.ROLES,
    "piece": words.THINGS_TO_WRITE,
    "situation": words.SITUATIONS,
    "wish": words.WISHES,
    "function": words.FUNCTIONS,
    "list": words.LISTS,
    "count": ["three", "five", "5", "3", "10", "ten", "four", "7", "six", "two"],
    "words": ["50", "100", "150", "200", "80", "300"],
}


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


CHAT = _lines("""
    hi, {situation}. what should I do?
    {situation}. any advice?
    Hey! {situation} and I don't know how to handle it. Can you help?
    I want to {wish}. Where do I start?
    How do I {wish}?
    what's the best way to {wish}
    Can you give me some tips on how to {wish}?
    I'd like to {wish} but I have very little time. Make me a plan for one week.
    Make a 30 day plan for me to {wish}.
    What do you think about {topic}?
    I'm really into {topic} lately. What should I read or watch?
    Tell me something surprising about {topic}.
    let's talk about {topic}
    I'm visiting {place} for two days. What should I see?
    Plan a weekend in {place} for a family with kids.
    What should I eat in {place}?
    Is {place} expensive? What's a realistic daily budget?
    Give me {count} {list}.
    Can you list {count} {list}?
    {count} {list} please
    I have {food}, {food2} and {food3}. What can I cook?
    give me a simple recipe with {food} and {food2}
    How do I cook {food} properly?
    What's the difference between {topic} and {other}?
    Which is better for beginners, {topic} or {other}?
    Recommend me a {object} for under $100. What should I look for?
    Should I buy a new {object} or repair the old one?
    My friend {name} has a birthday soon and likes {topic}. Gift ideas?
    You are {role}. Introduce yourself.
    Pretend you are {role} and explain {topic} to me.
    Act as {role}. I will ask you questions. First question: what do you think about {topic}?
    Roleplay: you are {role} and I just walked in and asked about {topic}.
    Tell me a joke about {topic}.
    Good morning! Can you help me plan my day? I need to work 6 hours, go shopping and {wish}.
    thanks for the help earlier! one more thing, how do I {wish}?
    I feel a bit down today because {situation}. Can you cheer me up?
    Ask me three quiz questions about {topic}.
""")
QUESTIONS = _lines("""
    What is {topic}?
    What are the main causes of {topic}?
    How does {topic} work?
    Explain {topic} to {audience}.
    explain {topic} in simple terms
    Explain {topic} in {words} words.
    Why is {topic} important?
    What are the advantages and disadvantages of {topic}?
    Give me a short history of {topic}.
    What are common misconceptions about {topic}?
    How is {topic} related to {other}?
    Compare {topic} and {other} in a table.
    What does someone need to know about {topic} before starting?
    Who are the most important people in the history of {topic}?
    what happens if there is too much {topic}
    Is {topic} good or bad for society? Give both sides.
    What are {count} facts about {topic}?
    Describe {topic} step by step.
    What is the capital of the country where {place} is, and what is it known for?
    Tell me about {place}.
    What is the weather like in {place} in spring?
    Write an outline for a presentation about {topic}.
    Create a study guide for {topic} with key terms.
    Give an example of {topic} from everyday life.
    What are some good questions to ask an expert on {topic}?
    define {topic}
    Summarize what is known about {topic} in {count} bullet points.
    What skills do I need for a career in {topic}?
    True or false: {topic} has nothing to do with {other}. Explain.
""")
WRITING = _lines("""
    Write {piece} about {topic}.
    Write {piece} about {topic} in a {tone} tone.
    write me {piece} about {name} and a {object}
    Write {piece} set in {place}.
    Write {piece} about {name}, who wants to {wish}.
    Write a {tone} email to {name} about a meeting on {topic}.
    Write an email to my landlord {name} because the heating does not work.
    Draft a {tone} message to my coworker {name}: {situation}.
    Write a thank you note to {name} for the {object}.
    Write a cover letter for a job at {company}.
    Write a product description for a {object} sold by {company}.
    Write a {tone} reply to a customer of {company} who complains about a broken {object}.
    Write a {words} word story that begins with: "{name} had never been to {place} before."
    Write the first paragraph of a mystery novel set in {place}.
    Continue the story: {name} opened the box and found an old {object} inside.
    Write a conversation between {name} and {person} about {topic}.
    Write {count} headlines for an article about {topic}.
    Write a slogan for {company}.
    Write {piece} for {audience} about {topic}.
    Give me an outline for an essay on {topic}.
    Write an introduction for an essay on why {topic} matters.
    Write a job posting for {company}, they look for someone who knows {topic}.
    Write an announcement for employees of {company} about new rules for {topic}.
    Write a toast for the wedding of {name} and {person}.
    Write a letter of recommendation for {name}, a student interested in {topic}.
    Write a short dialogue in a shop in {place} where {name} buys a {object}.
    Write rhyming verses about {food}.
    Write a review of a {object} I bought from {company}. I liked it but delivery was slow.
    Write a polite refusal to an invitation from {name}.
""")
CODE = _lines("""
    Write a {code} function that {function}.
    write a function in {code} that {function}
    Write a {code} program that {function}, with comments.
    How do I write something in {code} that {function}?
    {code}: {function}. Only the code please.
    Can you show me a simple {code} example that {function}? Explain each line.
    Write a Python function that {function}, with type hints and a docstring.
    Write a Python class that {function}.
    Write unit tests for a Python function that {function}.
    Write a Python script that {function}. Use argparse.
    Write a recursive function in {code} that {function}.
    I need a one-liner in Python that {function}.
    What is the time complexity of an algorithm that {function}? Show the code.
    Explain how to {wish} with a small Python program that tracks progress.
    How do I read a file line by line in {code}?
    What is the difference between a list and a tuple in Python?
    How do I handle errors in {code}? Give an example.
    Write a SQL query that returns the {count} customers with the most orders.
    Create an HTML page about {topic} with a heading, a list and a link.
    Write a CSS style for a card with an image of a {object}.
    Write a JSON document that describes a {object} with name, price, color and tags.
    Write a regular expression that matches phone numbers, and explain it.
    Write a bash script that backs up a folder every day.
    Write a small {code} game about {topic}.
    Design the classes for an app about {topic} in {code}.
    How would you store data about {topic} in a SQL database? Write the CREATE TABLE statements.
""")
REWRITES = _lines("""
    Translate to {language}: "{sentence}"
    How do you say "{sentence}" in {language}?
    Translate the following sentence into {language}: {sentence}
    Translate this into {language} and explain the grammar: {sentence}
    Rewrite this in a {tone} tone: {sentence}
    Make this sentence shorter: {sentence}
    Fix the grammar: {broken}
    Correct the spelling and punctuation: {broken}
    Paraphrase: {sentence}
    Rewrite the sentence in the past tense: {sentence}
    Rewrite it as a question: {sentence}
    Is the sentiment of this sentence positive or negative? "{sentence}"
    Which words in this sentence are verbs? {sentence}
    Turn this into a {tone} email: {sentence} {sentence2}
    Explain this sentence to {audience}: {sentence}
    Give me three alternative ways to say: {sentence}
    Expand this into a paragraph: {sentence}
""")
SENTENCES = _lines("""
    The train to {place} leaves at seven in the morning.
    {name} bought a new {object} last week and already loves it.
    I would like to reserve a table for two people, please.
    Could you tell me where the nearest pharmacy is?
    We are going to learn about {topic} next week.
    My brother lives in {place} and works for {company}.
    The meeting about {topic} has been moved to Thursday.
    Please send me the documents before the end of the month.
    It was raining when {name} arrived at the station.
    She has always been interested in {topic}.
    If I had known about {topic}, I would have called you earlier.
    The {object} does not work anymore, so I want my money back.
    {name} and {person} met in {place} many years ago.
    There is nothing better than {food} with {food2} on a cold evening.
    Our office in {place} is closed on public holidays.
    I don't think that {topic} is as difficult as people say.
    The children played in the garden until it got dark.
    He forgot his {object} on the bus again.
    You should drink more water and go to bed earlier.
    The museum in {place} has a large exhibition about {topic}.
    Where did you put the {object}?
    I am sorry for the late reply, I was on holiday in {place}.
    Thank you very much for your help with the {object}.
    Nobody at {company} knew how to fix the problem.
""")


def _arithmetic(random: random.Random) -> str:
    small, middle, large = random.randint(2, 12), random.randint(10, 99), random.randint(100, 999)
    name, thing = random.choice(words.NAMES), random.choice(words.OBJECTS)
    food = random.choice(words.FOODS)
    price = random.choice([2.5, 3, 4.25, 5, 7.5, 8, 12, 15, 20])
    return random.choice(
        [
            f"What is {middle} + {large}?",
            f"What is {middle} times {small}?",
            f"calculate {large} - {middle}",
            f"What is {random.choice([5, 10, 15, 20, 25, 30, 50])}% of {large}?",
            f"{name} buys {small} bags of {food} for ${price} each and pays with $100. How much change is that?",
            f"A {thing} costs ${large}. It is reduced by {random.choice([10, 15, 20, 25])}%. What is the new price?",
            f"If a car drives {middle} miles per hour, how far does it get in {small} hours? Explain step by step.",
            f"{name} has {middle} apples and gives {small} to each of {random.randint(2, 6)} friends. What is left?",
            f"A recipe for {small} people needs {middle * 10} grams of {food}. How much is needed for "
            f"{small + random.randint(1, 6)} people?",
            f"Solve for x: {small}x + {middle} = {small * random.randint(2, 20) + middle}",
            f"Solve the equation {small}x - {random.randint(1, 9)} = {middle}. Show your work.",
            f"A rectangle is {small} cm wide and {middle} cm long. What are its area and perimeter?",
            f"{name} is {middle} years old. In {small} years, how old will {name} be? And how old {small} years ago?",
            f"A train leaves at {random.randint(6, 11)}:{random.choice(['00', '15', '30', '45'])} and arrives "
            f"{random.randint(2, 7)} hours and {random.choice([10, 20, 25, 40, 50])} minutes later. When is that?",
            f"There are {middle} students in a class. {small} are absent. What fraction is present?",
            f"What comes next: {small}, {2 * small}, {4 * small}, {8 * small}, ...?",
            f"What comes next in the sequence {small}, {small + middle}, {small + 2 * middle}, {small + 3 * middle}?",
            f"Convert {middle} kilometers to miles.",
            f"Convert {large} minutes into hours and minutes.",
            f"I save ${middle} every week. How long until I can buy a {thing} for ${large * 2}?",
            f"Three friends share a bill of ${large}.{random.choice(['00', '50', '20'])} equally. What does each pay?",
            f"{name} reads {middle} pages a day. The book has {large} pages. How many days does it take? Think step by "
            "step.",
            f"Is {large} a prime number? Explain.",
            f"What is the greatest common divisor of {middle} and {small * 6}?",
            f"A bag has {small} red and {middle} blue marbles. What is the probability of drawing a red one?",
            f"If {small} workers need {middle} days, how many days do {small * 2} workers need?",
            f"All {thing}s are blue. This is a {thing}. Is it blue? Explain your reasoning.",
            f"{name} is taller than Kim. Kim is taller than Lee. Who is the shortest?",
            f"The average of {small}, {middle} and {large} is what?",
            f"A shop sells {middle} {thing}s on Monday and {small} more on Tuesday. How many in total?",
        ]
    )


BROKEN = (("the ", "teh "), ("are", "is"), (" a ", " an "), ("'", ""), ("has ", "have "), (". ", " "), ("I ", "i "))
KINDS: tuple[tuple[list[str], float], ...] = (
    (CHAT, 0.26),
    (QUESTIONS, 0.20),
    (WRITING, 0.16),
    (CODE, 0.16),
    (REWRITES, 0.12),
)


def template_prompt(random: random.Random) -> str:
    """One prompt of any kind."""
    dice = random.random()
    for templates, share in KINDS:
        if dice < share:
            return casual(fill(random.choice(templates), random), random)
        dice -= share
    return casual(_arithmetic(random), random)


def fill(template: str, random: random.Random) -> str:
    """The template with its blanks filled."""
    special: dict[str, Callable[[], str]] = {
        "sentence": lambda: fill(random.choice(SENTENCES), random),
        "sentence2": lambda: fill(random.choice(SENTENCES), random),
        "broken": lambda: _spoil(fill(random.choice(SENTENCES), random), random),
    }

    def blank(found: re.Match[str]) -> str:
        name = found[1]
        return special[name]() if name in special else random.choice(BLANKS[name])

    filled = re.sub(r"\{(\w+)\}", blank, template)
    return filled[0].upper() + filled[1:] if template[0] == "{" else filled


def casual(prompt: str, random: random.Random) -> str:
    """People do not always write neatly."""
    dice = random.random()
    if dice < 0.08:
        return prompt.lower().rstrip(".?!")
    if dice < 0.12:
        return prompt.lower()
    if dice < 0.16:
        return prompt.rstrip(".") + random.choice([" please", ", thanks", " pls", ". Thank you!", ". Keep it short."])
    if dice < 0.19:
        return random.choice(["Hi! ", "Hello, ", "hey ", "Quick question: ", "ok so ", "Please help me. "]) + prompt
    if dice < 0.22:
        return prompt.rstrip(".") + random.choice(
            [
                ". Answer in one sentence.",
                ". Use bullet points.",
                ". Be detailed.",
                ". Give an example.",
                ". No more than 50 words.",
            ]
        )
    return prompt


def _spoil(sentence: str, random: random.Random) -> str:
    for good, bad in random.sample(BROKEN, 3):
        sentence = sentence.replace(good, bad)
    letters = list(sentence)
    if len(letters) > 12:
        place = random.randrange(4, len(letters) - 4)
        letters[place], letters[place + 1] = letters[place + 1], letters[place]
    return "".join(letters)
