"""Requests to translate, as people write them: single sentences, messages, lists, words, and from other languages."""

from __future__ import annotations

import random
import re

from forerun.train.prompts import words

TONGUES = ("French", "Spanish", "German", "Italian", "Portuguese", "Dutch", "Polish", "Swedish")
TONGUE_WEIGHTS = (26, 26, 22, 11, 9, 3, 1.5, 1.5)
ENGLISH = words.items("""
    {name} called me {when} because the {thing} is broken again; I have been looking for my {thing} since {when};
    could we meet in front of the {building} at {hour}; the {building} opens at {hour} and closes at {hour2}; we
    would like to stay in {place} for {number} nights; how much does the {thing} cost with delivery to {place}; my
    {relative} will pick you up at the {building} {when}; {name} is {feeling} because nobody remembered the meeting;
    please do not park your car next to the {building}; is there a {building} near the {building2}; I left my
    {thing} in the {building}, did anyone find it; the {food} was cold and the waiter was not very friendly; would
    you mind closing the {part}, it is getting cold; {name} and {name2} are moving to {place} {when}; my {relative}
    has worked at the {building} for {number} years; the bus to {place} leaves every {number} minutes; I need a
    doctor, my {relative} has a high fever; we ran out of {food}, can you buy some on your way home; the weather was
    terrible, so we stayed at the {building} all day; let me know if {when} works for you; you have to turn left
    after the {building} and then go straight ahead; I am {feeling} that you could not come; the children are not
    allowed to play behind the {building}; {name} lost the key to the {building}; we have already paid for the
    {food} and the {food2}; can I exchange this {thing}, it is too small; nobody told me that the {building} would
    be closed {when}; the lights in the {building} do not work; my {relative} does not eat {food}; do you have a
    table for {number} people {when}; I only wanted to say hello; {name} speaks three languages and wants to learn a
    fourth; the package for {name} arrived {when}; if it rains {when}, we will go to the {building} instead of the
    beach; I was born in {place} and grew up in {place2}; the {thing} is on the table next to the {part}; can you
    help me carry this {thing} upstairs; what a nice surprise; we are {feeling} about the new neighbors; my phone
    was stolen near the {building}, whom should I tell; the train was {number} minutes late, so I missed the
    beginning of the film; he promised to call, but he never did; the rent is due on the first of the month; {name}
    is allergic to {food}; we had a wonderful time in {place}; they sell fresh {food} at the market behind the
    {building}; how long does it take to walk to the {building}; I would rather have the {food} than the {food2};
    there is a hair in my {food}; the {part} cannot be opened; the course begins {when} and costs {price} euros; I
    am writing to ask about the room in {place}; thank you for looking after our {pet} while we were away; the {pet}
    has eaten the {food} again; your appointment with Dr. {surname} has been moved to {hour}; my {relative} turns
    {number} {when}; I forgot the password for my account and cannot log in; the meeting with {surname} from
    {company} was cancelled; he has not finished his homework yet; don't forget to water the plants; I can't hear
    you, the music is too loud
""")
SPANISH = words.items("""
    Mi hermana vive en {place} desde hace {number} años; El tren de las {hour} llegó con mucho retraso;
    ¿Puede decirme dónde está la farmacia más cercana?; Hoy no puedo ir al trabajo porque estoy enfermo;
    {name} me regaló un libro muy interesante para mi cumpleaños; Se me olvidó comprar leche y pan;
    La reunión con {name} empieza a las {hour}; Nos gustaría reservar una mesa para {number} personas;
    ¿Cuánto cuesta una habitación con vistas al mar?; Los niños están jugando en el parque con sus amigos;
    Hace mucho calor en {place} durante el verano; No encuentro mis gafas por ninguna parte;
    Gracias por tu ayuda, no lo habría conseguido sin ti; {name} quiere aprender a tocar la guitarra;
    Ayer fuimos al cine y después cenamos en un restaurante pequeño; El ascensor no funciona desde el lunes
""")
FRENCH = words.items("""
    Mon frère travaille à {place} depuis {number} ans; Le magasin ferme à {hour}, il faut se dépêcher;
    Pourriez-vous me dire où se trouve la gare ?; Je suis désolé, mais je ne peux pas venir ce soir;
    {name} a oublié son parapluie dans le bus; Nous cherchons un appartement avec deux chambres près du centre;
    Il fait trop froid pour manger dehors aujourd'hui; La réunion avec {name} est reportée à jeudi;
    Est-ce que le petit déjeuner est compris dans le prix ?; Les enfants ont mangé tout le gâteau;
    Hier, nous avons visité un vieux château près de {place}; Mon ordinateur ne s'allume plus depuis hier;
    Merci beaucoup pour votre accueil, nous avons passé une très bonne soirée; {name} apprend à conduire
""")
GERMAN = words.items("""
    Meine Tante wohnt seit {number} Jahren in {place}; Der Zug nach {place} fährt um {hour} ab;
    Können Sie mir bitte sagen, wie spät es ist?; Ich muss heute länger arbeiten und komme später nach Hause;
    {name} hat uns zum Essen eingeladen; Das Wetter war schlecht, deshalb sind wir ins Museum gegangen;
    Die Waschmaschine ist kaputt und der Techniker kommt erst am Freitag; Wo kann ich hier eine Fahrkarte kaufen?;
    Wir suchen eine Wohnung mit Balkon und drei Zimmern; {name} lernt seit einem Jahr Klavier;
    Vielen Dank für Ihre Nachricht, ich melde mich morgen bei Ihnen; Der Kaffee ist kalt und viel zu teuer;
    Die Kinder spielen im Garten, obwohl es regnet; Am Wochenende fahren wir mit {name} an den See
""")
ITALIAN = words.items("""
    Mia nonna abita a {place} da {number} anni; Il treno parte alle {hour} dal binario due;
    Vorrei prenotare un tavolo per {number} persone; Dove posso comprare un biglietto per il museo?;
    {name} ha dimenticato il telefono in ufficio; Oggi fa molto freddo, mettiti il cappotto;
    Non ho capito bene, può ripetere per favore?; Ieri abbiamo mangiato una pizza buonissima vicino alla stazione
""")
PORTUGUESE = words.items("""
    O meu irmão mora em {place} há {number} anos; O ônibus sai às {hour} da praça principal;
    Onde fica o banheiro, por favor?; Preciso comprar frutas e pão para o café da manhã;
    {name} perdeu as chaves do carro na praia; Amanhã vamos visitar os meus avós;
    Não entendi a pergunta, pode repetir mais devagar?; O filme foi longo, mas gostei muito do final
""")
FOREIGN = {
    "Spanish": SPANISH,
    "French": FRENCH,
    "German": GERMAN,
    "Italian": ITALIAN,
    "Portuguese": PORTUGUESE,
}
NOUNS = words.items("""
    house; bread; river; mother; brother; green; yellow; to run; to sleep; to buy; spoon; table; chair; mountain;
    sea; milk; cheese; Tuesday; January; happy; tired; kitchen; street; hospital; doctor; friend; to sing; to
    forget; cloud; rain; summer; winter; dog; bird; horse; small; heavy; cheap; the day after tomorrow; to listen;
    shirt; shoe; key; door; book; garden; morning; evening; left; right; island; flower; onion; strawberry; lawyer;
    nurse; to write
""")
BLANKS = {
    "thing": words.OBJECTS,
    "food": words.FOODS,
    "food2": words.FOODS,
    "place": words.PLACES,
    "place2": words.PLACES,
    "surname": words.SURNAMES,
    "company": words.COMPANIES,
    "when": words.items("yesterday; tomorrow; on Sunday; next week; last Friday; this evening; on Tuesday; in May"),
    "building": words.items("""
        bakery; post office; town hall; hotel; airport; swimming pool; church; pharmacy; train station; museum;
        office; supermarket; bank; library; stadium; cinema; hospital; school; gas station; theater
    """),
    "part": words.items("window; door; drawer; gate; curtain; roof"),
    "pet": words.items("cat; dog; hamster; parrot; rabbit"),
    "relative": words.items("father; mother; uncle; cousin; grandmother; wife; husband; daughter; son; neighbor"),
    "feeling": words.items("happy; sad; worried; very sorry; angry; relieved; proud; surprised"),
}
BLANKS["building2"] = BLANKS["building"]
ONE = [
    "Translate into {tongue}: {text}",
    "Translate to {tongue}:\n{text}",
    'Translate "{text}" to {tongue}',
    "translate to {tongue} - {text}",
    'How do I say "{text}" in {tongue}?',
    "What is '{text}' in {tongue}?",
    "I need this in {tongue}: {text}",
    "Say this in {tongue}, please. {text}",
    "Can you translate this for my {tongue} colleague? {text}",
    'What would "{text}" be in {tongue}? Keep the names as they are.',
    "English to {tongue}: {text}",
    "{text}\n\nin {tongue} please",
    "{text} -> {tongue}",
    "Please translate the sentence below into {tongue}. Only give me the translation.\n\n{text}",
    "Translate into {tongue} and then into {tongue2}: {text}",
    "Give me a formal and an informal {tongue} version of: {text}",
    "Translate into {tongue}, then explain the difficult words: {text}",
]
MANY = [
    "Translate the following message into {tongue}:\n\n{text}",
    "Please translate this text to {tongue}. Leave the names unchanged.\n\n{text}",
    "can you put this email into {tongue} for me\n\n{text}",
    "Translate to {tongue}:\n\n{text}",
    "{text}\n\nTranslate the text above into {tongue}.",
    "My neighbor only speaks {tongue}. How do I write this to her?\n\n{text}",
]
BACK = [
    "Translate from {tongue} to English: {text}",
    "What does this {tongue} sentence mean? {text}",
    'What does "{text}" mean?',
    "Translate to English: {text}",
    "Someone wrote me this, what does it say? {text}",
    "{text}\n\nI don't speak {tongue}, can you translate this into English?",
    "In English please: {text}",
    "Which language is this, and what does it mean? {text}",
]
VOCABULARY = [
    "What are the {tongue} words for {text}?",
    "Make a small table with English and {tongue}: {text}",
    "Translate these words into {tongue}: {text}",
    "{tongue} vocabulary list for {text}, with articles please",
    "How do you say {text} in {tongue} and in {tongue2}?",
]
OPENINGS = ["Dear {name},", "Hi {name},", "Hello {name}!", "Dear Mr. {surname},", "Dear Ms. {surname},", "Hey {name}"]
CLOSINGS = [
    "Best wishes, {name2}",
    "See you soon, {name2}",
    "Kind regards\n{name2} {surname}",
    "Love, {name2}",
    "Thanks!",
]


def translation_prompt(chance: random.Random) -> str:
    """Some request for a translation."""
    kind = chance.choices(("one", "many", "steps", "back", "words"), weights=(40, 22, 6, 24, 8))[0]
    tongue, other = chance.choices(TONGUES, weights=TONGUE_WEIGHTS, k=2)
    if kind == "one":
        template, text = chance.choice(ONE), _sentence(chance)
    elif kind == "many":
        template, text = chance.choice(MANY), _message(chance)
    elif kind == "steps":
        template = chance.choice(MANY[:5])
        text = "\n".join(f"{number}. {_sentence(chance)}" for number in range(1, chance.randint(3, 6)))
    elif kind == "back":
        tongue = chance.choices(list(FOREIGN), weights=(30, 30, 22, 10, 8))[0]
        said = chance.sample(FOREIGN[tongue], chance.choice((1, 1, 2, 3)))
        template, text = chance.choice(BACK), " ".join(_ended(_filled(one, chance)) for one in said)
    else:
        template, text = chance.choice(VOCABULARY), ", ".join(chance.sample(NOUNS, chance.randint(3, 7)))
    return template.replace("{tongue}", tongue).replace("{tongue2}", other).replace("{text}", text)


def _sentence(chance: random.Random) -> str:
    filled = _filled(chance.choice(ENGLISH), chance)
    return _ended(filled[0].upper() + filled[1:])


def _ended(sentence: str) -> str:
    if sentence[-1] in ".?!":
        return sentence
    asks = re.match(r"(how|could|would you|is there|can|do you|what|where)\b", sentence.lower())
    return sentence + ("!" if sentence.startswith("What a") else "?" if asks else ".")


def _message(chance: random.Random) -> str:
    """A few sentences, often with a greeting and an end."""
    text = " ".join(_sentence(chance) for _ in range(chance.randint(2, 4)))
    if chance.random() < 0.6:
        text = _filled(chance.choice(OPENINGS), chance) + chance.choice((" ", "\n\n", "\n")) + text
    if chance.random() < 0.5:
        text += chance.choice((" ", "\n\n", "\n")) + _filled(chance.choice(CLOSINGS), chance)
    return text


def _filled(template: str, chance: random.Random) -> str:
    def blank(found: re.Match[str]) -> str:
        name = found[1]
        if name in BLANKS:
            return chance.choice(BLANKS[name])
        if name.startswith("name"):
            return chance.choice(words.NAMES)
        if name.startswith("hour"):
            return f"{chance.randint(7, 21)}:{chance.choice(('00', '15', '30', '45'))}"
        return str(chance.randint(3, 40) if name == "number" else 10 * chance.randint(2, 40))

    return re.sub(r"\{(\w+)\}", blank, template)
