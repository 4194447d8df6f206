// CuPy's complex numbers need Thrust's headers; nothing here has any.
#pragma once
template <class T> struct complex { T real, imag; };
