//! The language of composed forms: tensors and functions of rows, generic over the number.
//!
//! A composed form runs in 64-bit floats, where it checks the results of its kernel, and in any other arithmetic that
//! implements [`Number`].

mod array;
mod call;
mod number;
mod rows;

pub use array::Array;
pub(crate) use array::map;
pub use call::{FormCall, Logarithms};
pub use number::{FormScalar, Number};
pub(crate) use rows::{
    Softmax, dot, each_row, log_softmax, softmax, softmax_gradient, sum, two_rows,
};
