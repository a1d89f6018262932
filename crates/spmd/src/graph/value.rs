//! Values: the tensors that nodes read and write, with their roles.

use std::fmt;
use std::sync::Arc;

use burn::tensor::{DType, Shape};
use burn_fsdp_mesh::{Cut, Layout, Placement};
use burn_fsdp_tensors::StateFormat;
use burn_ir::{TensorId, TensorIr, TensorStatus};

/// A tensor that a node reads or writes.
#[derive(Debug, Clone, PartialEq)]
pub struct Value {
    /// Id of the value in operations.
    pub id: TensorId,
    /// Shape on one rank, equal on all ranks.
    pub shape: Vec<usize>,
    /// Type of the elements.
    pub dtype: DType,
    /// Role of the value in the train step.
    pub role: Role,
}

/// The role of a value in the train step. No node writes a *given* value. Paths are dotted module paths, such as
/// `blocks.0.fc.weight`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// A parameter of the module, trained or frozen. Given.
    Parameter(Arc<str>),
    /// A given tensor of the module that is not a parameter, such as a running mean.
    Buffer(Arc<str>),
    /// A tensor of the batch. Given at each step.
    Input(Arc<str>),
    /// A state of the optimizer, from the previous step. Given.
    State {
        /// The parameter that it belongs to.
        path: Arc<str>,
        /// Name of the tensor in the optimizer's state, such as `momentum.moment_1`.
        slot: Arc<str>,
    },
    /// A value of the previous step, for nodes that were moved to this step, or a sum over earlier micro-batches. The
    /// string is a parameter's path for its gradient, or `%` and a number for any other value. Given.
    Pending(Arc<str>),
    /// A tensor that a user's pass keeps from step to step, equal on all ranks. Given, see
    /// [`PassState`](crate::passes::PassState).
    PassState(Arc<str>),
    /// A tensor that is the same in every step. Given, see [`Graph::constants`](super::Graph::constants).
    Constant,
    /// The complete gradient of a parameter: the value that the optimizer reads.
    Gradient(Arc<str>),
    /// Any other value that a node writes.
    Temporary,
}

impl Role {
    /// Returns true if the value comes from outside the graph: no node writes it.
    pub fn is_given(&self) -> bool {
        !matches!(self, Self::Gradient(_) | Self::Temporary)
    }

    /// Returns the module path of a parameter, buffer, gradient or state, or the string of a pending value.
    pub fn path(&self) -> Option<&Arc<str>> {
        match self {
            Self::Parameter(path)
            | Self::Buffer(path)
            | Self::Gradient(path)
            | Self::Pending(path)
            | Self::PassState(path)
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
            Self::Pending(path) => {
                if path.starts_with('%') {
                    write!(f, "pending value {path}")
                } else {
                    write!(f, "pending gradient {path}")
                }
            }
            Self::PassState(path) => write!(f, "state {path} of a pass"),
            Self::Constant => f.write_str("constant"),
            Self::Gradient(path) => write!(f, "gradient {path}"),
            Self::Temporary => f.write_str("temporary"),
        }
    }
}

impl Value {
    /// Creates a value with this id.
    pub fn new(id: TensorId, shape: impl Into<Vec<usize>>, dtype: DType, role: Role) -> Self {
        Self {
            id,
            shape: shape.into(),
            dtype,
            role,
        }
    }

    /// Returns the number of elements on one rank.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the size in bytes on one rank, assuming that the value has separate memory.
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

/// A parameter or buffer of the module, with its gradient and states.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Dotted path in the module.
    pub path: Arc<str>,
    /// The value that nodes read. It has the shape of this rank's part.
    pub value: TensorId,
    /// Shape of the whole parameter.
    pub shape: Vec<usize>,
    /// Type of the elements.
    pub dtype: DType,
    /// Layout of the value, of the gradient, and of states with the parameter's shape.
    pub layout: Layout,
    /// The complete gradient that the optimizer reads; `None` for buffers and for parameters that are frozen or unused.
    pub gradient: Option<TensorId>,
    /// The optimizer's states, in the optimizer's order.
    pub states: Vec<TensorId>,
    /// The states whose shape differs from the parameter's. They are whole on each rank, even if a shard of the
    /// parameter has their shape.
    pub whole_states: Vec<TensorId>,
    /// The format in which the states are kept between steps, as bytes; `None` if it is the optimizer's own.
    pub state_format: Option<StateFormat>,
    /// True for a buffer, which is never sharded.
    pub is_buffer: bool,
}

impl Parameter {
    /// Returns the number of elements of the whole parameter.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns where shards may begin: between blocks of elements if states have a scale for each block.
    pub(crate) fn cut(&self) -> Cut {
        cut_of(self.state_format)
    }
}

/// Returns where the shards of a parameter may begin whose states have this format.
pub(crate) fn cut_of(state_format: Option<StateFormat>) -> Cut {
    match state_format {
        Some(StateFormat::Block8) => Cut::Multiples(StateFormat::BLOCK),
        None | Some(StateFormat::Bf16) => Cut::Elements,
    }
}

/// Replaces a given value with another before the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Update {
    /// A given value, such as a parameter, a buffer or a state.
    pub into: TensorId,
    /// The value that replaces it.
    pub from: TensorId,
}

/// A value that the user named to request its placement. Several values can share a name.
#[derive(Debug, Clone)]
pub(crate) struct NamedActivation {
    pub(crate) name: Arc<str>,
    pub(crate) value: TensorId,
}

/// The placements and the owner of a value that is carried over to the next step.
#[derive(Debug, Clone, Default)]
pub(crate) struct Carried {
    /// A placement for each mesh axis; `None` for a value that differs between ranks.
    pub(crate) on: Vec<Option<Placement>>,
    /// The index of the owner along the shard axis, if one rank has the whole value.
    pub(crate) owner: Option<usize>,
}

/// The only ranks that have a value: all ranks with this index along this axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    /// Name of the axis.
    pub axis: Arc<str>,
    /// Index along the axis.
    pub index: usize,
}
