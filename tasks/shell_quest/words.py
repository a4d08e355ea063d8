"""The closed vocabulary of shell_quest: file names, content words and prompt wordings. The tokenizer of the tiny model
gives each name and word one token of its own, and the generator draws from nothing else.
"""

NAMES = (
    *("alpha.txt", "beta.txt", "gamma.txt", "delta.txt", "apple.txt", "pear.txt", "plum.txt", "grape.txt"),
    *("lemon.txt", "melon.txt", "peach.txt", "mango.txt", "onion.txt", "carrot.txt", "bread.txt", "cheese.txt"),
    *("milk.txt", "coffee.txt", "rice.txt", "pasta.txt", "honey.txt", "salt.txt", "pepper.txt", "lamp.txt"),
)
WORDS = (
    *("red", "blue", "green", "gold", "silver", "wolf", "tiger", "zebra"),
    *("eagle", "river", "ocean", "forest", "cloud", "storm", "stone", "paper"),
    *("music", "garden", "rocket", "engine"),
)
PROMPTS = {
    "largest": ("Delete the largest file.", "Remove the biggest file."),
    "smallest": ("Delete the smallest file.", "Remove the smallest file."),
    "copy": ("Copy {name} into backup/.", "Put a copy of {name} in backup/."),
    "count": (
        "Count the lines of {name} and write the number to answer.txt.",
        "How many lines are there in {name}? Write it to answer.txt.",
    ),
    "find": (
        "Find the file containing the word {word} and write its name to answer.txt.",
        "Which file contains {word}? Write its name to answer.txt.",
    ),
    "rename": ("Rename {name} to {other}.", "Rename the file {name} to {other}."),
    "delword": ("Delete the file containing the word {word}.", "Remove the file that contains {word}."),
}
FAMILIES = tuple(PROMPTS)
