"""Reading a file of pictures or video: its properties, its frames, and their pixels at the size of a clip."""
