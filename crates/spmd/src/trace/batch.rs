//! The names, shapes and values of a batch's tensors, and their fakes in a trace.

use std::hash::Hash;

use burn::backend::DispatchTensor;
use burn::tensor::kind::Basic;
use burn::tensor::{Bool, DType, Device, Int, Shape, Tensor, TensorData};
use burn_fsdp_collectives::Fingerprint;
use burn_fsdp_tensors::{Batch, BatchMapper};
use burn_ir::{BackendIr, HandleKind};

use super::capture::{Captured, bool_id, float_id, int_id};
use crate::error::Error;

/// Name, shape and type of a tensor of a batch.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct InputSpec {
    /// Name of the tensor, such as `0` for the first of a tuple, or `images`.
    pub name: String,
    /// Shape on this rank.
    pub shape: Vec<usize>,
    /// Type of the elements.
    pub dtype: DType,
}

/// Returns the names, shapes and types of a batch's tensors. A graph is valid only for batches with equal specs.
///
/// # Errors
///
/// [`Error::DuplicateName`] if two tensors have the same name.
pub fn specs_of<B: Batch>(batch: &B) -> Result<Vec<InputSpec>, Error> {
    let mut specs =
        Walk::new(|name: String, shape: Vec<usize>, dtype| InputSpec { name, shape, dtype });
    let _ = batch.clone().map(&mut specs);
    let found = specs.found;
    for (index, spec) in found.iter().enumerate() {
        if found[..index].iter().any(|other| other.name == spec.name) {
            return Err(Error::DuplicateName {
                what: "input",
                name: spec.name.clone(),
            });
        }
    }
    Ok(found)
}

/// Returns the names and hashes of a batch's values that are not tensors. A graph is valid only for batches with equal
/// values.
pub(crate) fn fixed_of<B: Batch>(batch: &B) -> Vec<(String, u64)> {
    let mut walk = Walk::new(|_: String, _: Vec<usize>, _| ());
    let _ = batch.clone().map(&mut walk);
    walk.fixed
}

/// The value of a batch's tensor for a step on the backend `B`.
pub(crate) enum InputValue<B: BackendIr> {
    /// A tensor in the step's memory. Nothing is copied.
    Lent {
        tensor: HandleKind<B>,
        shape: Vec<usize>,
        dtype: DType,
    },
    /// Elements that were read back.
    Read(TensorData),
}

/// Returns the values of a batch's tensors, in the order of [`specs_of`]. `lend` returns the handle of a tensor, or
/// `None` to read its elements.
pub(crate) fn values_of<T: Batch, B: BackendIr>(
    batch: &T,
    lend: impl Fn(DispatchTensor) -> Option<HandleKind<B>>,
) -> Vec<InputValue<B>> {
    struct Values<B: BackendIr, L> {
        found: Vec<InputValue<B>>,
        lend: L,
    }
    impl<B: BackendIr, L: Fn(DispatchTensor) -> Option<HandleKind<B>>> Values<B, L> {
        fn add<const D: usize, K: Basic>(&mut self, tensor: &Tensor<D, K>) {
            let lent = (self.lend)(tensor.clone().into_dispatch());
            self.found.push(match lent {
                Some(handle) => InputValue::Lent {
                    tensor: handle,
                    shape: tensor.dims().to_vec(),
                    dtype: tensor.dtype(),
                },
                None => InputValue::Read(tensor.to_data()),
            });
        }
    }
    impl<B: BackendIr, L: Fn(DispatchTensor) -> Option<HandleKind<B>>> BatchMapper for Values<B, L> {
        fn float<const D: usize>(&mut self, _: &str, tensor: Tensor<D>) -> Tensor<D> {
            self.add(&tensor);
            tensor
        }
        fn int<const D: usize>(&mut self, _: &str, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
            self.add(&tensor);
            tensor
        }
        fn bool<const D: usize>(&mut self, _: &str, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
            self.add(&tensor);
            tensor
        }
        fn fixed(&mut self, _: &str, _: &impl Hash) {}
        fn enter(&mut self, _: &str) {}
        fn exit(&mut self) {}
    }
    let found = Vec::new();
    let mut values = Values { found, lend };
    let _ = batch.clone().map(&mut values);
    values.found
}

/// The names of the batch parts that enclose a mapper's position.
#[derive(Default)]
pub(super) struct Path(pub(super) Vec<String>);

impl Path {
    pub(super) fn of(&self, leaf: &str) -> String {
        let names = self.0.iter().map(String::as_str);
        let names: Vec<_> = names
            .chain([leaf])
            .filter(|name| !name.is_empty())
            .collect();
        if names.is_empty() {
            "batch".to_owned()
        } else {
            names.join(".")
        }
    }
}

struct Walk<T, F> {
    path: Path,
    found: Vec<T>,
    /// Names and hashes of values that are not tensors.
    fixed: Vec<(String, u64)>,
    make: F,
}

impl<T, F: FnMut(String, Vec<usize>, DType) -> T> Walk<T, F> {
    fn new(make: F) -> Self {
        Self {
            path: Path::default(),
            found: Vec::new(),
            fixed: Vec::new(),
            make,
        }
    }

    fn add(&mut self, name: &str, shape: Vec<usize>, dtype: DType) {
        let item = (self.make)(self.path.of(name), shape, dtype);
        self.found.push(item);
    }
}

impl<T, F: FnMut(String, Vec<usize>, DType) -> T> BatchMapper for Walk<T, F> {
    fn float<const D: usize>(&mut self, name: &str, tensor: Tensor<D>) -> Tensor<D> {
        self.add(name, tensor.dims().to_vec(), tensor.dtype());
        tensor
    }

    fn int<const D: usize>(&mut self, name: &str, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        self.add(name, tensor.dims().to_vec(), tensor.dtype());
        tensor
    }

    fn bool<const D: usize>(&mut self, name: &str, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
        self.add(name, tensor.dims().to_vec(), tensor.dtype());
        tensor
    }

    fn fixed(&mut self, name: &str, value: &impl Hash) {
        self.fixed
            .push((self.path.of(name), Fingerprint::of(value)));
    }

    fn enter(&mut self, name: &str) {
        self.path.0.push(name.to_owned());
    }

    fn exit(&mut self) {
        self.path.0.pop();
    }
}

/// A function that returns the shape to trace for a batch tensor, given its name and shape.
pub(crate) type JoinedShape<'a> = &'a dyn Fn(&str, &[usize]) -> Vec<usize>;

/// Replaces every tensor of a batch with a fake one on the capture device, with the joined shape and the same type.
pub(super) struct Fake<'a, F> {
    pub(super) device: &'a Device,
    pub(super) path: Path,
    pub(super) joined: JoinedShape<'a>,
    /// Callback with the name of each tensor and its fake; `None` for a fake that is not on the capture device.
    pub(super) found: F,
}

impl<F> Fake<'_, F> {
    fn shape<const D: usize>(&self, name: &str, dims: [usize; D]) -> Shape {
        Shape::from((self.joined)(&self.path.of(name), &dims))
    }
}

impl<F: FnMut(String, Option<Captured>)> BatchMapper for Fake<'_, F> {
    fn float<const D: usize>(&mut self, name: &str, tensor: Tensor<D>) -> Tensor<D> {
        let fake = Tensor::empty(
            self.shape(name, tensor.dims()),
            (self.device, tensor.dtype()),
        );
        (self.found)(self.path.of(name), float_id(&fake));
        fake
    }

    fn int<const D: usize>(&mut self, name: &str, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        let fake = Tensor::empty(
            self.shape(name, tensor.dims()),
            (self.device, tensor.dtype()),
        );
        (self.found)(self.path.of(name), int_id(&fake));
        fake
    }

    fn bool<const D: usize>(&mut self, name: &str, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
        let fake = Tensor::empty(
            self.shape(name, tensor.dims()),
            (self.device, tensor.dtype()),
        );
        (self.found)(self.path.of(name), bool_id(&fake));
        fake
    }

    fn fixed(&mut self, _: &str, _: &impl Hash) {}

    fn enter(&mut self, name: &str) {
        self.path.0.push(name.to_owned());
    }

    fn exit(&mut self) {
        self.path.0.pop();
    }
}
