"""The lab's stand-in for the Hugging Face Hub."""
