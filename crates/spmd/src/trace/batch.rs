//! Batches: the tensors that a loss closure receives in addition to the model.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::hash::{BuildHasher, Hash};

use burn::tensor::{Bool, DType, Device, Int, Shape, Tensor, TensorData};
use burn_fsdp_collectives::Fingerprint;

use super::capture::{Captured, bool_id, float_id, int_id};
use crate::error::Error;

/// The tensors that a loss closure receives in addition to the model.
///
/// It is implemented for tensors and for tuples, arrays, vectors, options, boxes and maps of batches, nested in any
/// way. Implement it for a struct by mapping its fields in a fixed order. Each length of a vector, each set of keys of
/// a map, and the presence or absence of an option gets its own graph. A map's values are visited in the order of their
/// keys.
///
/// Fields that are not tensors are frozen into the graph with their values in the traced batch, unless they are named
/// with [`BatchMapper::fixed`]:
///
/// ```
/// use burn::tensor::{Int, Tensor};
/// use burn_fsdp_spmd::{Batch, BatchMapper};
///
/// #[derive(Clone)]
/// struct Labelled {
///     images: Tensor<4>,
///     labels: Tensor<1, Int>,
///     num_classes: usize,
/// }
///
/// impl Batch for Labelled {
///     fn map(self, mapper: &mut impl BatchMapper) -> Self {
///         mapper.fixed("num_classes", &self.num_classes);
///         Self {
///             images: mapper.float("images", self.images),
///             labels: mapper.int("labels", self.labels),
///             ..self
///         }
///     }
/// }
/// ```
pub trait Batch: Clone + 'static {
    /// Passes every tensor to the mapper, always in the same order and under the same names, and returns the batch of
    /// the mapped tensors.
    fn map(self, mapper: &mut impl BatchMapper) -> Self;
}

/// Maps each tensor of a batch; see [`Batch::map`].
pub trait BatchMapper {
    /// Maps a float tensor with this name.
    fn float<const D: usize>(&mut self, name: &str, tensor: Tensor<D>) -> Tensor<D>;
    /// Maps an int tensor with this name.
    fn int<const D: usize>(&mut self, name: &str, tensor: Tensor<D, Int>) -> Tensor<D, Int>;
    /// Maps a bool tensor with this name.
    fn bool<const D: usize>(&mut self, name: &str, tensor: Tensor<D, Bool>) -> Tensor<D, Bool>;
    /// Records a value with this name that is not a tensor, such as a length or a flag. Each distinct value gets its
    /// own graph. Pass a value that changes in every step, such as a learning rate, as a tensor instead.
    fn fixed(&mut self, name: &str, value: &impl Hash);
    /// Enters the part of the batch with this name. Names inside it are reported as `name.inner`.
    fn enter(&mut self, name: &str);
    /// Leaves the part that was entered last.
    fn exit(&mut self);
}

impl<const D: usize> Batch for Tensor<D> {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        mapper.float("", self)
    }
}

impl<const D: usize> Batch for Tensor<D, Int> {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        mapper.int("", self)
    }
}

impl<const D: usize> Batch for Tensor<D, Bool> {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        mapper.bool("", self)
    }
}

impl Batch for () {
    fn map(self, _: &mut impl BatchMapper) -> Self {}
}

impl<B: Batch, const N: usize> Batch for [B; N] {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        let mut index = 0;
        self.map(|part| {
            index += 1;
            mapped(&(index - 1).to_string(), part, mapper)
        })
    }
}

impl<B: Batch> Batch for Box<B> {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        Self::new((*self).map(mapper))
    }
}

impl<B: Batch> Batch for Option<B> {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        mapper.fixed("is_some", &self.is_some());
        self.map(|part| part.map(mapper))
    }
}

impl<B: Batch> Batch for Vec<B> {
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        mapper.fixed("len", &self.len());
        let parts = self.into_iter().enumerate();
        let parts = parts.map(|(index, part)| mapped(&index.to_string(), part, mapper));
        parts.collect()
    }
}

impl<K, B> Batch for BTreeMap<K, B>
where
    K: Clone + Ord + Hash + Display + 'static,
    B: Batch,
{
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        let keys: Vec<_> = self.keys().collect();
        mapper.fixed("keys", &keys);
        let parts = self.into_iter().map(|(key, part)| {
            let part = mapped(&key.to_string(), part, mapper);
            (key, part)
        });
        parts.collect()
    }
}

impl<K, B, S> Batch for HashMap<K, B, S>
where
    K: Clone + Ord + Hash + Display + 'static,
    B: Batch,
    S: BuildHasher + Clone + Default + 'static,
{
    fn map(self, mapper: &mut impl BatchMapper) -> Self {
        let sorted: BTreeMap<K, B> = self.into_iter().collect();
        Batch::map(sorted, mapper).into_iter().collect()
    }
}

/// Maps a part under its name.
fn mapped<B: Batch>(name: &str, part: B, mapper: &mut impl BatchMapper) -> B {
    mapper.enter(name);
    let part = part.map(mapper);
    mapper.exit();
    part
}

/// Casts the float tensors of a batch to another type. Other tensors stay unchanged.
///
/// ```
/// use burn::tensor::{DType, Device, Int, Tensor};
/// use burn_fsdp_spmd::cast_floats;
///
/// let device = Device::flex();
/// let tokens = Tensor::<2, Int>::zeros([2, 3], &device);
/// let integers = tokens.dtype();
/// let images = vec![Some(Tensor::<4>::ones([2, 3, 4, 4], &device)), None];
/// let (tokens, images) = cast_floats((tokens, images), DType::BF16);
/// assert_eq!(tokens.dtype(), integers);
/// assert_eq!(images[0].as_ref().map(Tensor::dtype), Some(DType::BF16));
/// ```
pub fn cast_floats<B: Batch>(nest: B, dtype: DType) -> B {
    struct Cast(DType);
    impl BatchMapper for Cast {
        fn float<const D: usize>(&mut self, _: &str, tensor: Tensor<D>) -> Tensor<D> {
            if tensor.dtype() == self.0 {
                tensor
            } else {
                tensor.cast(self.0)
            }
        }
        fn int<const D: usize>(&mut self, _: &str, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
            tensor
        }
        fn bool<const D: usize>(&mut self, _: &str, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
            tensor
        }
        fn fixed(&mut self, _: &str, _: &impl Hash) {}
        fn enter(&mut self, _: &str) {}
        fn exit(&mut self) {}
    }
    nest.map(&mut Cast(dtype))
}

macro_rules! tuple_batch {
    ($($name:ident $index:literal),+) => {
        impl<$($name: Batch),+> Batch for ($($name,)+) {
            fn map(self, mapper: &mut impl BatchMapper) -> Self {
                #[allow(non_snake_case, reason = "the type parameters name the parts")]
                let ($($name,)+) = self;
                ($(mapped($index, $name, mapper),)+)
            }
        }
    };
}

tuple_batch!(A "0");
tuple_batch!(A "0", B "1");
tuple_batch!(A "0", B "1", C "2");
tuple_batch!(A "0", B "1", C "2", E "3");
tuple_batch!(A "0", B "1", C "2", E "3", F "4");
tuple_batch!(A "0", B "1", C "2", E "3", F "4", G "5");
tuple_batch!(A "0", B "1", C "2", E "3", F "4", G "5", H "6");
tuple_batch!(A "0", B "1", C "2", E "3", F "4", G "5", H "6", I "7");

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

/// Reads the data of a batch's tensors back to the host, and returns it with their names.
pub fn data_of<B: Batch>(batch: &B) -> Vec<(String, TensorData)> {
    struct Read {
        path: Path,
        found: Vec<(String, TensorData)>,
    }
    impl BatchMapper for Read {
        fn float<const D: usize>(&mut self, name: &str, tensor: Tensor<D>) -> Tensor<D> {
            self.found.push((self.path.of(name), tensor.to_data()));
            tensor
        }
        fn int<const D: usize>(&mut self, name: &str, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
            self.found.push((self.path.of(name), tensor.to_data()));
            tensor
        }
        fn bool<const D: usize>(&mut self, name: &str, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
            self.found.push((self.path.of(name), tensor.to_data()));
            tensor
        }
        fn fixed(&mut self, _: &str, _: &impl Hash) {}
        fn enter(&mut self, name: &str) {
            self.path.0.push(name.to_owned());
        }
        fn exit(&mut self) {
            self.path.0.pop();
        }
    }
    let mut read = Read {
        path: Path::default(),
        found: Vec::new(),
    };
    let _ = batch.clone().map(&mut read);
    read.found
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
