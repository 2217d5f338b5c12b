"""Word problems as people pose them, about money, time, ages, sharing, mixing, measuring and logic."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from forerun.train.prompts import words
from forerun.train.prompts.templates import casual

PROBLEMS = words.items("""
    {name} earns {price} dollars an hour and works {small} hours on {small2} days. How much is that in a week?; A
    taxi costs {small} dollars plus {price} dollars for every mile. What do {number} miles cost?; {name} bought
    {small} {object}s for {large} dollars in all. What did one cost?; A ticket is {number} dollars, children pay
    half. What do {small} adults and {small2} children pay together?; I have {large} dollars and spend {percent}% on
    rent and {price} dollars on food. What is left?; A {object} costs {number} dollars more than a {object2}.
    Together they cost {large} dollars. What does each cost?; {name} is {small} years older than {name2}. Together
    they are {number} years old. How old is each of them?; In {small} years {name} will be twice as old as today.
    How old is {name} now?; A film starts at {clock} and lasts {number} minutes plus {small} minutes of ads. When is
    it over?; {name} slept from 22:{minute} to 6:{minute2}. How long was that?; The bus comes every {small2} minutes
    and the tram every {small} minutes. Both come at {clock}. When do both come again?; It takes {name} {number}
    minutes to mow a lawn and {name2} {number2} minutes. How long do they need together?; A tank holds {large}
    liters. Every minute {small2} liters flow in and {small} leak out. When is it full?; {name} walks {small} km in
    {number} minutes. How far is that in an hour?; A car needs {small} liters for 100 km. How much does it need for
    {large} km, and what does that cost at 2 dollars a liter?; A garden is {number} m long and {small} m wide. How
    much fence does it need, and how much lawn?; How many tiles of {small} cm by {small} cm fit on a wall of {large}
    cm by {number} cm?; {name} cuts a ribbon of {large} cm into pieces of {small2} cm. How many pieces are there and
    what is left over?; A class has {number} students. {percent}% play an instrument, and half of those play the
    piano. How many is that?; The price went from {number} to {large} dollars. By how many percent did it rise?;
    {large} people were asked, and {number} said yes. What percentage is that?; {name} reads {small} pages every
    evening and twice as many on Sundays. How long does a book of {large} pages last?; There are {number} animals on
    a farm, chickens and goats, with {legs} legs in all. How many goats are there?; A box holds {small} rows of
    {small2} eggs. How many boxes are needed for {large} eggs?; {name}, {name2} and {name3} share {large} dollars.
    {name} gets twice as much as {name2}, and {name3} as much as {name2}. What does each one get?; Mix {small}
    liters of juice with {small2} liters of water. What share is juice?; What is {small}/{small2} plus 1/{small}?
    Show each step.; Which is more, {percent}% of {large} or {number}?; Simplify: {small}(x + {small2}) - {number} +
    2x; Solve: {number} - {small}x = {small2}; Expand (x + {small})(x - {small2}).; If y = {small}x + {number}, what
    is y for x = {small2}, and for which x is y = {large}?; Find two numbers with the sum {number} and the
    difference {small}.; Is {large} divisible by {small}? How can you tell?; What is the area of a triangle with a
    base of {number} cm and a height of {small} cm?; Write {large} as a product of primes.; {name} throws two dice.
    How likely is a sum of {small2}?; How many ways are there to seat {small} people in a row?; A bag has {small}
    green and {small2} white balls. I take two. How likely are two green ones?; {name} finished before {name2}.
    {name3} finished after {name2}. Who came last? Explain.; {name}, {name2} and {name3} sit in a row. {name} does
    not sit in the middle, and {name2} sits on the far left. Who sits where?; One of {name}, {name2} and {name3} ate
    the cake. {name} says it was {name2}. {name2} says it was not me. Only one of the two is telling the truth. Who
    can it be?; Today is {day}. What day is it in {number} days?; If all {object}s are heavy and nothing heavy
    floats, can a {object} float?; {name} faces north, turns right twice and then left. Which way does {name} look
    now?; A snail climbs {small2} meters a day and slides back {small} at night. The wall is {number} meters high.
    How long does it need?; I think of a number, double it, add {number} and get {large}. What was it?; A rope burns
    in {number} minutes. How long do {small} ropes burn one after the other?; {name} has {number} coins, some worth
    5 cents and some 10 cents, {money} cents in all. How many of each?; A recipe for {small} people needs {large} g
    of {food}. We are {small2} people. How much do I need?; Convert {number} miles to kilometers, roughly.; What is
    {large} divided by {small}, with remainder?; Round {large}.{number} to the nearest ten.; {name} pays {percent}%
    tax on {large}00 dollars. How much remains?; If {small} cats catch {small2} mice in an hour, how many do
    {number} cats catch?; How many minutes are {small} days and {small2} hours?
""")
ENDINGS = [
    "",
    "",
    "",
    "",
    " Show your work.",
    " Step by step please.",
    " Explain how you get there.",
    " Just the result.",
]
DAYS = words.items("Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday")


def puzzle_prompt(chance: random.Random) -> str:
    """One problem with numbers of its own."""
    names = chance.sample([name for name in words.NAMES if " " not in name], 3)
    number = chance.randint(12, 96)
    spans: dict[str, Callable[[], object]] = {
        "small": lambda: chance.randint(2, 9),
        "small2": lambda: chance.randint(3, 15),
        "number": lambda: number,
        "number2": lambda: chance.randint(10, 90),
        "large": lambda: chance.randint(100, 960),
        "legs": lambda: 2 * number + 2 * chance.randint(1, number - 1),
        "money": lambda: 5 * number + 5 * chance.randint(1, number - 1),
        "percent": lambda: 5 * chance.randint(1, 17),
        "price": lambda: chance.choice((2.5, 4, 6.5, 9, 12, 13.5, 18, 22)),
        "clock": lambda: f"{chance.randint(7, 20)}:{5 * chance.randint(0, 11):02}",
        "minute": lambda: f"{5 * chance.randint(0, 11):02}",
        "minute2": lambda: f"{5 * chance.randint(0, 11):02}",
        "day": lambda: chance.choice(DAYS),
        "food": lambda: chance.choice(words.FOODS),
        "object": lambda: chance.choice(words.OBJECTS),
        "object2": lambda: chance.choice(words.OBJECTS),
    }
    facts = {name: str(draw()) for name, draw in spans.items()}
    facts |= {"name": names[0], "name2": names[1], "name3": names[2]}
    text = re.sub(r"\{(\w+)\}", lambda found: facts[found[1]], chance.choice(PROBLEMS))
    return casual(text + chance.choice(ENDINGS), chance)
