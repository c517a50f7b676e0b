"""Tables, plots and one self-contained HTML page from the results of a comparison."""
