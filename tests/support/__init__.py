"""What tests build on."""
