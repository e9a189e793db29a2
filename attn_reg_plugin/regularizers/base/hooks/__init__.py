"""How a method is put on a model: the attachment, the forward that it intercepts, and what is put back."""
