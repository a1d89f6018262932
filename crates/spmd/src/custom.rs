//! Custom operations: their implementations and their costs.
//!
//! A model that captures a custom operation, as an [`OperationIr::Custom`](burn_ir::OperationIr::Custom), can be
//! compiled if the step supports the operation, see [`CompiledStep::operations`](crate::CompiledStep::operations).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use burn::backend::Flex;
use burn_flex::FlexTensor;
use burn_ir::{BackendIr, CustomOpIr, HandleKind, OperationIr, TensorIr};

use crate::error::Error;
use crate::graph::{CustomProfile, Graph};

/// A custom operation on a backend. On Burn's CPU backend, [`CustomOperations::kernel`] creates one from two functions.
pub trait CustomOperation<B: BackendIr>: Send + Sync {
    /// Returns the id that the operation is captured with.
    fn name(&self) -> &str;

    /// Computes the outputs of a call in order, with the shapes and types that the call declares. An input that is the
    /// last handle of its tensor may be overwritten.
    ///
    /// # Errors
    ///
    /// A description of the problem with the call.
    fn run(
        &self,
        call: &CustomOpIr,
        inputs: Vec<HandleKind<B>>,
    ) -> Result<Vec<HandleKind<B>>, String>;

    /// Returns the properties of a call that passes and plans need.
    fn profile(&self, call: &CustomOpIr) -> CustomProfile;
}

/// The operations that a step supports in addition to Burn's, by name.
///
/// ```
/// use burn_fsdp_spmd::CustomOperations;
/// use burn_fsdp_spmd::graph::CustomProfile;
///
/// let profile = CustomProfile { written_over: Some(0), ..CustomProfile::default() };
/// let operations = CustomOperations::new().kernel(
///     "identity",
///     |_call, tensors| tensors,
///     move |_call| profile,
/// );
/// assert_eq!(operations.names().collect::<Vec<_>>(), ["identity"]);
/// ```
pub struct CustomOperations<B: BackendIr = Flex> {
    by_name: BTreeMap<String, Arc<dyn CustomOperation<B>>>,
}

impl<B: BackendIr> CustomOperations<B> {
    /// Creates an empty set of operations.
    pub fn new() -> Self {
        Self {
            by_name: BTreeMap::new(),
        }
    }

    /// Adds an operation, replacing any earlier one with the same name.
    #[must_use]
    pub fn with(mut self, operation: impl CustomOperation<B> + 'static) -> Self {
        let name = operation.name().to_owned();
        self.by_name.insert(name, Arc::new(operation));
        self
    }

    /// Adds operations, replacing earlier ones with the same names.
    pub(crate) fn and(mut self, operations: Self) -> Self {
        self.by_name.extend(operations.by_name);
        self
    }

    /// Returns the names of the operations, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// Stores the profile of each call of a custom operation in its node, for passes and plans.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownOperation`] for a call of an operation that is not in the set.
    pub fn describe(&self, mut graph: Graph) -> Result<Graph, Error> {
        let mut nodes = graph.take_nodes();
        for node in nodes.iter_mut().filter(|node| node.collective.is_none()) {
            if let OperationIr::Custom(call) = &node.operation {
                node.custom = Some(self.get(call)?.profile(call));
            }
        }
        graph.set_nodes(nodes);
        Ok(graph)
    }

    pub(crate) fn get(&self, call: &CustomOpIr) -> Result<&dyn CustomOperation<B>, Error> {
        let found = self.by_name.get(&call.id).map(Arc::as_ref);
        found.ok_or_else(|| Error::UnknownOperation {
            name: call.id.clone(),
        })
    }
}

impl CustomOperations {
    /// Adds an operation on Burn's CPU backend: `run` computes the outputs of a call from its inputs, and `profile`
    /// returns the call's properties.
    #[must_use]
    pub fn kernel<R, P>(self, name: impl Into<String>, run: R, profile: P) -> Self
    where
        R: Fn(&CustomOpIr, Vec<FlexTensor>) -> Vec<FlexTensor> + Send + Sync + 'static,
        P: Fn(&CustomOpIr) -> CustomProfile + Send + Sync + 'static,
    {
        self.with(Kernel {
            name: name.into(),
            run,
            profile,
        })
    }
}

/// An operation on Burn's CPU backend.
struct Kernel<R, P> {
    name: String,
    run: R,
    profile: P,
}

impl<R, P> CustomOperation<Flex> for Kernel<R, P>
where
    R: Fn(&CustomOpIr, Vec<FlexTensor>) -> Vec<FlexTensor> + Send + Sync,
    P: Fn(&CustomOpIr) -> CustomProfile + Send + Sync,
{
    fn name(&self) -> &str {
        &self.name
    }

    fn run(
        &self,
        call: &CustomOpIr,
        inputs: Vec<HandleKind<Flex>>,
    ) -> Result<Vec<HandleKind<Flex>>, String> {
        let inputs = inputs.into_iter().map(|input| match input {
            HandleKind::Float(tensor) | HandleKind::Int(tensor) | HandleKind::Bool(tensor) => {
                Ok(tensor)
            }
            HandleKind::Quantized(_) => Err("its tensors must not be quantized".to_owned()),
        });
        let outputs = (self.run)(call, inputs.collect::<Result<_, _>>()?);
        let kind = |(tensor, output): (FlexTensor, &TensorIr)| match output.dtype {
            dtype if dtype.is_float() => HandleKind::Float(tensor),
            dtype if dtype.is_bool() => HandleKind::Bool(tensor),
            _ => HandleKind::Int(tensor),
        };
        let num_outputs = outputs.len();
        let outputs: Vec<_> = outputs.into_iter().zip(&call.outputs).map(kind).collect();
        if outputs.len() == num_outputs {
            Ok(outputs)
        } else {
            Err(format!("it returned {num_outputs} tensors"))
        }
    }

    fn profile(&self, call: &CustomOpIr) -> CustomProfile {
        (self.profile)(call)
    }
}

impl<B: BackendIr> Default for CustomOperations<B> {
    fn default() -> Self {
        Self::new()
    }
}

impl<B: BackendIr> Clone for CustomOperations<B> {
    fn clone(&self) -> Self {
        Self {
            by_name: self.by_name.clone(),
        }
    }
}

impl<B: BackendIr> fmt::Debug for CustomOperations<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}
