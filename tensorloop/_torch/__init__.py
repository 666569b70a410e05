"""Every private name of torch that the library uses, once, with the reason and the versions it was tried with."""
