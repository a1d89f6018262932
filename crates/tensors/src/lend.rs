//! Tensors as bytes that collectives read, in the machine's order. Memory of the host is lent in place, and other memory
//! is read back.

use std::borrow::Borrow;
use std::ops::Range;

use burn::backend::Flex;
use burn::tensor::{Tensor, TensorData};
use burn_backend::try_read_sync;
use burn_flex::FlexTensor;
use burn_fsdp_collectives::{Account, Source};
use burn_ir::{BackendIr, HandleKind};

/// The bytes of a tensor of the CPU backend, read in place.
struct InPlace {
    tensor: FlexTensor,
    range: Range<usize>,
    /// Counts the bytes as unsharded as long as a rank may still read them.
    _account: Option<Account>,
}

impl AsRef<[u8]> for InPlace {
    fn as_ref(&self) -> &[u8] {
        &self.tensor.bytes()[self.range.clone()]
    }
}

/// The first bytes of elements on the host.
struct OnHost<D> {
    data: D,
    num_bytes: usize,
    _account: Option<Account>,
}

impl<D: Borrow<TensorData>> AsRef<[u8]> for OnHost<D> {
    fn as_ref(&self) -> &[u8] {
        &self.data.borrow().as_bytes()[..self.num_bytes]
    }
}

/// Lends the elements of a flat tensor without autodiff. The CPU backend copies nothing; other devices are read back.
/// The `account` counts the bytes until no rank reads them anymore.
///
/// # Panics
///
/// If another device cannot be read.
pub fn source(tensor: Tensor<1>, account: Option<Account>) -> Source {
    debug_assert!(!tensor.is_autodiff(), "collectives take plain tensors");
    let num_bytes = tensor.shape().num_elements() * tensor.dtype().size();
    match tensor.clone().try_into_primitive::<Flex>() {
        Ok(primitive) => {
            drop(tensor);
            in_place(primitive, num_bytes, account)
        }
        Err(_) => first_of(tensor.into_data(), num_bytes, account),
    }
}

/// Lends elements on the host, of any type and shape. They may be shared.
pub fn data_source(data: impl Borrow<TensorData> + Send + Sync + 'static) -> Source {
    let num_bytes = data.borrow().as_bytes().len();
    first_of(data, num_bytes, None)
}

/// Lends the first `num_bytes` bytes of a tensor of the CPU backend, in the order of its dims. Elements in another order
/// are copied. Also returns true if the bytes are all of the tensor's memory, in its order. The tensor must have at least
/// `num_bytes` bytes.
pub fn first_bytes(tensor: FlexTensor, num_bytes: usize) -> (Source, bool) {
    let offsets = tensor.layout().contiguous_offsets();
    let is_whole =
        offsets.is_some_and(|(start, _)| start == 0) && num_bytes == tensor.bytes().len();
    (in_place(tensor, num_bytes, None), is_whole)
}

fn in_place(tensor: FlexTensor, num_bytes: usize, account: Option<Account>) -> Source {
    let (tensor, start) = match tensor.layout().contiguous_offsets() {
        Some((start, _)) => (tensor, start),
        // The copy is in order.
        None => (tensor.to_contiguous(), 0),
    };
    let start = start * tensor.dtype().size();
    Source::new(InPlace {
        range: start..start + num_bytes,
        tensor,
        _account: account,
    })
}

pub(crate) fn first_of<D>(data: D, num_bytes: usize, account: Option<Account>) -> Source
where
    D: Borrow<TensorData> + Send + Sync + 'static,
{
    Source::new(OnHost {
        data,
        num_bytes,
        _account: account,
    })
}

/// Reads a tensor of any type back to the host.
///
/// # Errors
///
/// A description of the failure, if the backend cannot be read.
pub fn read<B: BackendIr>(tensor: HandleKind<B>) -> Result<TensorData, String> {
    let data = match tensor {
        HandleKind::Float(tensor) => try_read_sync(B::float_into_data(tensor)),
        HandleKind::Int(tensor) => try_read_sync(B::int_into_data(tensor)),
        HandleKind::Bool(tensor) => try_read_sync(B::bool_into_data(tensor)),
        HandleKind::Quantized(tensor) => try_read_sync(B::q_into_data(tensor)),
    };
    let data = data.ok_or("the backend does not support synchronous reads")?;
    data.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, Int};

    use super::*;

    fn flex(tensor: Tensor<2>) -> FlexTensor {
        tensor.try_into_primitive::<Flex>().expect("on the CPU")
    }

    fn floats(source: &Source) -> Vec<f32> {
        let (words, rest) = source.as_bytes().as_chunks::<4>();
        assert!(rest.is_empty());
        words.iter().map(|word| f32::from_ne_bytes(*word)).collect()
    }

    #[test]
    fn memory_of_the_host_is_lent_in_place_in_the_order_of_its_dims() {
        let device = Device::flex();
        let whole = Tensor::<1, Int>::arange(0..6, &device).float();
        let at = |source: &Source| source.as_bytes().as_ptr();
        let lent = source(whole.clone(), None);
        assert_eq!(floats(&lent), [0., 1., 2., 3., 4., 5.]);
        let part = source(whole.clone().narrow(0, 2, 3), None);
        assert_eq!(floats(&part), [2., 3., 4.]);
        assert_eq!(at(&part), at(&lent).wrapping_add(8));

        let matrix = whole.reshape([2, 3]);
        let (lent_again, is_whole) = first_bytes(flex(matrix.clone()), 24);
        assert!(is_whole);
        assert_eq!(at(&lent_again), at(&lent));
        let (first, is_whole) = first_bytes(flex(matrix.clone()), 8);
        assert_eq!((floats(&first), is_whole), (vec![0., 1.], false));
        // Elements in another order are copied, so they are not the tensor's memory.
        let (turned, is_whole) = first_bytes(flex(matrix.transpose()), 24);
        assert_eq!(
            (floats(&turned), is_whole),
            (vec![0., 3., 1., 4., 2., 5.], false)
        );
    }
}
