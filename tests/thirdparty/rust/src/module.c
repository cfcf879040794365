/* The module that Python imports: hands the table of lib.rs to ktk. */
#include <Python.h>

#include "ktk/abi.h"

extern const ktk_backend rust_backend;

static PyObject* export_backend(PyObject* self, PyObject* unused) {
  (void)self, (void)unused;
  return PyCapsule_New((void*)&rust_backend, KTK_CAPSULE_NAME, NULL);
}

static PyMethodDef methods[] = {
    {"__ktk_backend__", export_backend, METH_NOARGS, "Return the backend table."},
    {0},
};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ktk_rust_backend",
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit_ktk_rust_backend(void) {
  PyObject* made = PyModule_Create(&module);
#ifdef Py_GIL_DISABLED /* or a free-threaded Python would switch on its lock */
  if (made) PyUnstable_Module_SetGIL(made, Py_MOD_GIL_NOT_USED);
#endif
  return made;
}
