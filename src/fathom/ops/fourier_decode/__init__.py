"""One query over raw channels and Fourier coefficients."""
