//! What nodes read and write.

use std::fmt;
use std::sync::Arc;

use burn::tensor::{DType, Shape};
use burn_fsdp_mesh::Partition;
use burn_ir::{TensorId, TensorIr, TensorStatus};

use super::placement::AxisPlacement;

/// A tensor that a node reads or writes.
#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    /// Names it in operations.
    pub id: TensorId,
    /// On one rank, the same on all.
    pub shape: Vec<usize>,
    /// Type of its elements.
    pub dtype: DType,
    /// What it is to the train step.
    pub role: Role,
}

/// What a value is to the train step. Paths are a module's dotted paths, such as `blocks.0.fc.weight`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// A parameter of the module, trained or frozen. Given.
    Parameter(Arc<str>),
    /// A tensor of the module that is no parameter, such as a running mean. Given.
    Buffer(Arc<str>),
    /// A tensor of the batch. Given anew at each step.
    Input(Arc<str>),
    /// A state of the optimizer, from the step before. Given.
    State {
        /// The parameter that it belongs to.
        path: Arc<str>,
        /// Its name in the optimizer's state, such as `momentum.moment_1`.
        slot: Arc<str>,
    },
    /// The gradient of a parameter from the step before, for an optimizer that has been put off. Given.
    Pending(Arc<str>),
    /// The same in every step. Given, see [`Graph::constants`](super::Graph::constants).
    Constant,
    /// The complete gradient of a parameter: the value that the optimizer reads.
    Gradient(Arc<str>),
    /// Everything else that a node writes.
    Temporary,
}

impl Role {
    /// Whether the value comes from outside the graph: no node writes it.
    pub fn is_given(&self) -> bool {
        !matches!(self, Self::Gradient(_) | Self::Temporary)
    }

    /// The module path, for parameters, buffers, gradients and states.
    pub fn path(&self) -> Option<&Arc<str>> {
        match self {
            Self::Parameter(path)
            | Self::Buffer(path)
            | Self::Gradient(path)
            | Self::Pending(path)
            | Self::State { path, .. } => Some(path),
            Self::Input(_) | Self::Constant | Self::Temporary => None,
        }
    }
}

/// Prints as `parameter blocks.0.fc.weight`.
impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Parameter(path) => write!(f, "parameter {path}"),
            Self::Buffer(path) => write!(f, "buffer {path}"),
            Self::Input(name) => write!(f, "input {name}"),
            Self::State { path, slot } => write!(f, "state {path} {slot}"),
            Self::Pending(path) => write!(f, "pending gradient {path}"),
            Self::Constant => f.write_str("constant"),
            Self::Gradient(path) => write!(f, "gradient {path}"),
            Self::Temporary => f.write_str("temporary"),
        }
    }
}

impl Value {
    /// A value of that id.
    pub fn new(id: TensorId, shape: impl Into<Vec<usize>>, dtype: DType, role: Role) -> Self {
        Self {
            id,
            shape: shape.into(),
            dtype,
            role,
        }
    }

    /// Number of elements on one rank.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes on one rank, if the value has memory of its own.
    pub fn num_bytes(&self) -> usize {
        self.num_elements() * self.dtype.size()
    }

    pub(crate) fn to_read(&self) -> TensorIr {
        TensorIr {
            id: self.id,
            shape: Shape::from(self.shape.clone()),
            status: TensorStatus::ReadOnly,
            dtype: self.dtype,
        }
    }
}

/// A parameter or buffer of the module, and what belongs to it.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Dotted path in the module.
    pub path: Arc<str>,
    /// The value that nodes read. Its shape is that of this rank's part.
    pub value: TensorId,
    /// Shape of the whole.
    pub shape: Vec<usize>,
    /// Type of the elements.
    pub dtype: DType,
    /// How ranks divide it.
    pub layout: ParameterLayout,
    /// The complete gradient that the optimizer reads; `None` for buffers and for parameters that
    /// are frozen or unused.
    pub gradient: Option<TensorId>,
    /// The optimizer's states, in its order.
    pub states: Vec<TensorId>,
    /// A tensor that is no parameter: never sharded.
    pub is_buffer: bool,
}

impl Parameter {
    /// Number of elements of the whole.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// How ranks divide a parameter, its gradient and its states.
#[derive(Debug, Clone, PartialEq)]
pub enum ParameterLayout {
    /// Every rank has the whole.
    Whole,
    /// The elements in order of the dims are cut into equal chunks, one per rank, padded at the end
    /// with zeros: the value has shape `[partition.chunk_len()]` on every rank.
    Flat(Partition),
    /// Cut along dims, in equal parts, or replicated, on each axis of a mesh.
    Placed(Arc<[AxisPlacement]>),
}

/// Feeds a value into a given one for the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Update {
    /// A given value: a parameter, a buffer or a state.
    pub into: TensorId,
    /// What it will be.
    pub from: TensorId,
}
