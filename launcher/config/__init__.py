"""gin: the files and bindings of a recipe, checked before anything is built, and what of them was used."""
