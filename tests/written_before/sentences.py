import gin


@gin.configurable
class Sentences:
    name = "sentences"

    def check(self):
        pass

    def digest(self):
        return "1"

    def train(self):
        return [f"the {word} sat on the mat" for word in ("cat", "dog", "cow", "ant", "owl", "pig")]

    def held_out(self):
        return ["the hen sat on the mat"]
