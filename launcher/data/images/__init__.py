"""Images: sets by name, in folders or in records, as stored images, augmented batch by batch."""
