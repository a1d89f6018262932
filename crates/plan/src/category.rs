//! The categories of a step's memory.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Index, IndexMut};

use burn_fsdp_collectives::Share;
use burn_ir::TensorId;
use serde::Serialize;

use burn_fsdp_spmd::graph::{Graph, Phase, Role, Stage};

/// The purpose of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// This rank's parameters: its shards, or whole parameters if they are not sharded.
    Parameters,
    /// Gradients, full or this rank's shards.
    Gradients,
    /// This rank's optimizer states, for its parameters.
    OptimizerState,
    /// Parameters gathered from all ranks.
    FullParameters,
    /// Results of forward.
    Activations,
    /// Everything else that backward and the optimizer compute.
    Temporaries,
    /// Untrained tensors of the module, constants and the batch.
    Buffers,
}

impl Category {
    /// All categories, in the order in which they are printed and stacked.
    pub const ALL: [Self; 7] = [
        Self::Parameters,
        Self::OptimizerState,
        Self::Buffers,
        Self::Gradients,
        Self::FullParameters,
        Self::Activations,
        Self::Temporaries,
    ];

    /// Returns the category's name, such as `full parameters`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Parameters => "parameters",
            Self::Gradients => "gradients",
            Self::OptimizerState => "optimizer state",
            Self::FullParameters => "full parameters",
            Self::Activations => "activations",
            Self::Temporaries => "temporaries",
            Self::Buffers => "buffers",
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Bytes by category.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Bytes {
    /// This rank's parameters: its shards, or whole parameters if they are not sharded.
    pub parameters: u64,
    /// Gradients, full or this rank's shards.
    pub gradients: u64,
    /// This rank's optimizer states, for its parameters.
    pub optimizer_state: u64,
    /// Parameters gathered from all ranks.
    pub full_parameters: u64,
    /// Results of forward.
    pub activations: u64,
    /// Everything else that backward and the optimizer compute.
    pub temporaries: u64,
    /// Untrained tensors of the module, constants and the batch.
    pub buffers: u64,
}

impl Bytes {
    /// Returns the sum over all categories.
    pub fn total(&self) -> u64 {
        Category::ALL.iter().map(|category| self[*category]).sum()
    }
}

impl Index<Category> for Bytes {
    type Output = u64;

    fn index(&self, category: Category) -> &u64 {
        match category {
            Category::Parameters => &self.parameters,
            Category::Gradients => &self.gradients,
            Category::OptimizerState => &self.optimizer_state,
            Category::FullParameters => &self.full_parameters,
            Category::Activations => &self.activations,
            Category::Temporaries => &self.temporaries,
            Category::Buffers => &self.buffers,
        }
    }
}

impl IndexMut<Category> for Bytes {
    fn index_mut(&mut self, category: Category) -> &mut u64 {
        match category {
            Category::Parameters => &mut self.parameters,
            Category::Gradients => &mut self.gradients,
            Category::OptimizerState => &mut self.optimizer_state,
            Category::FullParameters => &mut self.full_parameters,
            Category::Activations => &mut self.activations,
            Category::Temporaries => &mut self.temporaries,
            Category::Buffers => &mut self.buffers,
        }
    }
}

/// Returns the category of every value in a graph.
pub(crate) fn categories(graph: &Graph) -> BTreeMap<TensorId, Category> {
    let mut categories = BTreeMap::new();
    for value in graph.values() {
        let category = match &value.role {
            Role::Parameter(_) => Some(Category::Parameters),
            Role::State { .. } => Some(Category::OptimizerState),
            Role::Buffer(_) | Role::PassState(_) | Role::Input(_) | Role::Constant => {
                Some(Category::Buffers)
            }
            Role::Gradient(_) | Role::Pending(_) => Some(Category::Gradients),
            Role::Temporary => None,
        };
        categories.extend(category.map(|category| (value.id, category)));
    }
    for node in graph.nodes() {
        let by_phase = match node.phase {
            Phase::Forward => Category::Activations,
            Phase::Backward | Phase::Optimizer => Category::Temporaries,
        };
        let collective = node.collective.as_ref();
        let contract = collective.map(|collective| collective.kind.contract());
        let category = match contract {
            Some(contract) if contract.reduces && node.phase != Phase::Forward => {
                Category::Gradients
            }
            Some(contract) if !contract.reduces && contract.gets.share == Share::Full => {
                Category::FullParameters
            }
            _ => by_phase,
        };
        let is_reduction = contract.is_some_and(|contract| contract.reduces)
            && collective.is_some_and(|collective| collective.stage != Stage::Wait);
        if is_reduction && node.phase != Phase::Forward {
            // The operand of a reduction is also a gradient.
            categories.extend(node.inputs().map(|id| (id, Category::Gradients)));
        }
        for output in node.outputs() {
            categories.entry(output).or_insert(category);
        }
    }
    for update in graph.updates() {
        if let Some(category) = categories.get(&update.into).copied() {
            categories.insert(update.from, category);
        }
    }
    categories
}
