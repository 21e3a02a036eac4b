"""The functions of other libraries, argument for argument, which run `varlen_attention`. A module for each library."""
