//! Operations that are not Burn's: how they run, and what they take.
//!
//! A model that captures an operation of its own, as an [`OperationIr::Custom`](burn_ir::OperationIr::Custom),
//! trains compiled if the step knows it: see [`CompiledStep::with_operations`](crate::CompiledStep::with_operations).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use burn::backend::Flex;
use burn_ir::{BackendIr, CustomOpIr, HandleKind, OperationIr};

use crate::Error;
use crate::graph::{CustomProfile, Graph};

/// An operation that is not Burn's.
///
/// ```
/// use burn::backend::Flex;
/// use burn_fsdp_spmd::graph::CustomProfile;
/// use burn_fsdp_spmd::{CustomOperation, CustomOperations};
/// use burn_ir::{CustomOpIr, HandleKind};
///
/// /// Gives its operand back.
/// struct Identity;
///
/// impl CustomOperation<Flex> for Identity {
///     fn name(&self) -> &str {
///         "identity"
///     }
///
///     fn run(
///         &self,
///         _call: &CustomOpIr,
///         inputs: Vec<HandleKind<Flex>>,
///     ) -> Result<Vec<HandleKind<Flex>>, String> {
///         Ok(inputs)
///     }
///
///     fn profile(&self, _call: &CustomOpIr) -> CustomProfile {
///         CustomProfile { written_over: Some(0), ..CustomProfile::default() }
///     }
/// }
///
/// let operations: CustomOperations = CustomOperations::new().with(Identity);
/// assert_eq!(operations.names().collect::<Vec<_>>(), ["identity"]);
/// ```
pub trait CustomOperation<B: BackendIr>: Send + Sync {
    /// The id that it is captured with.
    fn name(&self) -> &str;

    /// Computes the outputs of a call in their order, of the shapes and types that the call declares.
    /// An input that is the last handle of its tensor may be written over.
    ///
    /// # Errors
    ///
    /// What is wrong with the call, in words.
    fn run(
        &self,
        call: &CustomOpIr,
        inputs: Vec<HandleKind<B>>,
    ) -> Result<Vec<HandleKind<B>>, String>;

    /// What passes and plans must know of a call.
    fn profile(&self, call: &CustomOpIr) -> CustomProfile;
}

/// The operations that a step knows beside Burn's, by name.
pub struct CustomOperations<B: BackendIr = Flex> {
    by_name: BTreeMap<String, Arc<dyn CustomOperation<B>>>,
}

impl<B: BackendIr> CustomOperations<B> {
    /// None.
    pub fn new() -> Self {
        Self {
            by_name: BTreeMap::new(),
        }
    }

    /// Adds one, in place of another of its name.
    #[must_use]
    pub fn with(mut self, operation: impl CustomOperation<B> + 'static) -> Self {
        let name = operation.name().to_owned();
        self.by_name.insert(name, Arc::new(operation));
        self
    }

    /// Their names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(String::as_str)
    }

    /// Notes at each call of a custom operation what it takes, for passes and plans.
    ///
    /// # Errors
    ///
    /// [`Error::UnknownOperation`] for a call of none of these.
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

impl<B: BackendIr, O: CustomOperation<B> + 'static> FromIterator<O> for CustomOperations<B> {
    fn from_iter<I: IntoIterator<Item = O>>(operations: I) -> Self {
        operations.into_iter().fold(Self::new(), Self::with)
    }
}

impl<B: BackendIr> fmt::Debug for CustomOperations<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}
