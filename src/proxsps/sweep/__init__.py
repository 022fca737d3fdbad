"""Many runs of one problem: what to run (`spec`), how (`engines`) and where results are kept (`store`)."""
