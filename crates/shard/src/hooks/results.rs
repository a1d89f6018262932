//! Checks of the tensors that a hook returns, or passes to the engine's collectives.

use burn::tensor::Tensor;
use burn_fsdp_collectives::ElementType;
use burn_fsdp_tensors as tensors;

use crate::error::Error;

/// Checks that `tensors` has one tensor of floats, flat and without autodiff, for each parameter in `expected`: its path
/// and the number of elements. `of` is the subject of errors, and `what` describes the tensors.
pub(super) fn check<'a>(
    of: &str,
    what: &str,
    tensors: &[Tensor<1>],
    expected: impl ExactSizeIterator<Item = (&'a str, usize)>,
) -> Result<(), Error> {
    if tensors.len() != expected.len() {
        return Err(refused(
            of,
            &format!("{} tensors", expected.len()),
            format!("{what} {} tensors", tensors.len()),
        ));
    }
    for ((path, elements), tensor) in expected.zip(tensors) {
        float_type(of, tensor)?;
        let [len] = tensor.dims();
        if len != elements {
            return Err(refused(
                of,
                &format!("{elements} elements for `{path}`"),
                format!("{what} {len} elements"),
            ));
        }
    }
    Ok(())
}

/// Returns the collectives' type of a tensor's elements.
///
/// # Errors
///
/// [`Error::Hook`] for a tensor with autodiff, and for types that the collectives cannot reduce.
pub(super) fn float_type(of: &str, tensor: &Tensor<1>) -> Result<ElementType, Error> {
    if tensor.is_autodiff() {
        let got = "passed a tensor with a graph".to_owned();
        return Err(refused(of, "plain tensors", got));
    }
    tensors::reduced_type(tensor.dtype()).ok_or_else(|| {
        let got = format!("passed a tensor of type {:?}", tensor.dtype());
        refused(of, "floats", got)
    })
}

fn refused(of: &str, expected: &str, got: String) -> Error {
    Error::Hook {
        of: of.to_owned(),
        expected: expected.to_owned(),
        got,
    }
}
