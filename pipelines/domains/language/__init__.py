"""The language domain: decoders on packed documents."""
