//! The random inputs of a step (parameters, buffers, states and batches), sharded like the plan's.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::tensor::TensorData;
use burn_fsdp_kernels::FusedOperation;
use burn_fsdp_mesh::{Cut, Layout, Mesh, Region};
use burn_ir::{BaseOperationIr, ModuleOperationIr, OperationIr, TensorId, TensorIr};

use super::field::{Hash, of_number};
use super::tensor::{Kind, Tensor, View, filled, strides};
use burn_fsdp_spmd::Expand;
use burn_fsdp_spmd::graph::{Graph, Role, Trait, Value, is};

/// The source of a step's random inputs.
pub(super) struct Given<'a> {
    pub(super) mesh: Mesh,
    /// The number of valid indices of each integer input, by name.
    pub(super) bounds: &'a BTreeMap<Arc<str>, usize>,
    /// The placements of the batch's tensors, if the ranks share one joined batch.
    pub(super) joined: Option<&'a Expand>,
    /// Number of the run: every run has a different batch.
    pub(super) run: u64,
}

impl Given<'_> {
    /// Returns a rank's part of a given value.
    pub(super) fn of(&self, graph: &Graph, value: &Value, rank: usize) -> Result<Tensor, String> {
        let kind = Kind::of(value.dtype);
        match &value.role {
            Role::Constant => match graph.constants().get(&value.id) {
                Some(data) => constant(data, kind),
                None => Err("it has no data".to_owned()),
            },
            Role::Input(name) => {
                let drawn = match self.joined {
                    None => {
                        let seed = self.seed(&value.role, &[self.run, rank as u64]);
                        filled(seed, &value.shape, kind)
                    }
                    Some(expand) => self.part_of_batch(expand, name, value, rank)?,
                };
                Ok(match (kind, self.bounds.get(name)) {
                    (Kind::Int, Some(bound)) => within(&drawn, *bound as u64),
                    _ => drawn,
                })
            }
            Role::PassState(_) => Ok(filled(self.seed(&value.role, &[]), &value.shape, kind)),
            // Each rank has running statistics of its own rows, unless the batch is joined.
            Role::Buffer(_) => {
                let of = if self.joined.is_some() {
                    0
                } else {
                    rank as u64
                };
                Ok(filled(self.seed(&value.role, &[of]), &value.shape, kind))
            }
            Role::Parameter(path) | Role::State { path, .. } => {
                let seed = self.seed(&value.role, &[]);
                let whole = |shape: &[usize]| filled(seed, shape, kind);
                match part_of(graph, path, value) {
                    None => Ok(whole(&value.shape)),
                    Some((layout, shape)) => cut(
                        (&whole(shape), kind),
                        layout,
                        &self.mesh,
                        rank,
                        &value.shape,
                    ),
                }
            }
            Role::Pending(path) => Err(format!("no step left a gradient of `{path}`")),
            Role::Gradient(_) | Role::Temporary => Err("no node writes it".to_owned()),
        }
    }

    /// Returns a rank's part of a tensor of the joined batch.
    fn part_of_batch(
        &self,
        expand: &Expand,
        name: &str,
        value: &Value,
        rank: usize,
    ) -> Result<Tensor, String> {
        let seed = self.seed(&value.role, &[self.run]);
        let kind = Kind::of(value.dtype);
        if self.mesh.size() == 1 {
            return Ok(filled(seed, &value.shape, kind));
        }
        let shape = expand.joined_shape(&self.mesh, name, &value.shape);
        let placed = expand.of_joined_input(&self.mesh, name, &shape);
        let placed = placed.map_err(|error| error.to_string())?;
        let layout = Layout {
            placements: placed.into_iter().map(|axis| axis.placement).collect(),
            cut: Cut::Dims,
            owner: None,
        };
        let whole = filled(seed, &shape, kind);
        cut((&whole, kind), &layout, &self.mesh, rank, &value.shape)
    }

    fn seed(&self, role: &Role, words: &[u64]) -> Hash {
        let mut hash = Hash::named(&role.to_string());
        words.iter().for_each(|word| hash.write(*word));
        hash
    }
}

/// Returns the layout and whole shape of a value that is sharded like a parameter.
pub(super) fn part_of<'a>(
    graph: &'a Graph,
    path: &str,
    value: &'a Value,
) -> Option<(&'a Layout, &'a [usize])> {
    let parameter = graph.parameter(path)?;
    let is_cut = !parameter.layout.is_whole() && !parameter.whole_states.contains(&value.id);
    // A value with an owner has its own shape there. This includes states whose shape differs from the parameter's.
    let shape = match parameter.layout.owner {
        Some(_) => &value.shape,
        None => &parameter.shape,
    };
    is_cut.then_some((&parameter.layout, shape.as_slice()))
}

/// Returns a rank's part of a whole tensor, padded to `shape`. Flat shards are padded with zeros, because norms include
/// the padding. Parts along dims are padded with random elements that differ between ranks, so a read of padding is
/// detected.
pub(super) fn cut(
    (whole, kind): (&Tensor, Kind),
    layout: &Layout,
    mesh: &Mesh,
    rank: usize,
    shape: &[usize],
) -> Result<Tensor, String> {
    let places = places(layout, (&whole.shape, shape), mesh, rank)?;
    let len = shape.iter().product();
    let mut elements = match layout.cut {
        Cut::Dims if places.len() < len => {
            let mut seed = Hash::named("padding");
            seed.write(rank as u64);
            filled(seed, shape, kind).elements.to_vec()
        }
        _ => vec![0; len],
    };
    for (at, own) in places {
        elements[own] = whole.elements[at];
    }
    Ok(Tensor::new(shape, elements))
}

/// Flat indices of elements, each in the whole tensor and in a rank's part.
type Places = Vec<(usize, usize)>;

/// Returns the flat indices of a rank's elements, each in the whole tensor and in the rank's padded part.
pub(super) fn places(
    layout: &Layout,
    (whole, part): (&[usize], &[usize]),
    mesh: &Mesh,
    rank: usize,
) -> Result<Places, String> {
    let region = layout.region(whole, mesh, rank);
    let places: Places = match region.map_err(|error| error.to_string())? {
        Region::Flat(range) => range.zip(0..).collect(),
        Region::Box { offsets, sizes } => {
            if sizes.iter().zip(part).any(|(size, held)| size > held) || sizes.len() != part.len() {
                return Err(format!("{part:?} cannot hold {sizes:?}"));
            }
            let own = boxed(part, &vec![0; part.len()], &sizes);
            boxed(whole, &offsets, &sizes)
                .into_iter()
                .zip(own)
                .collect()
        }
    };
    let len: usize = part.iter().product();
    if places.iter().any(|(_, own)| *own >= len) {
        Err(format!("it has {len} elements instead of {}", places.len()))
    } else {
        Ok(places)
    }
}

/// Returns the flat indices of a box in a tensor.
fn boxed(shape: &[usize], offsets: &[usize], sizes: &[usize]) -> Vec<usize> {
    let mut view = View {
        shape: shape.to_vec(),
        strides: strides(shape),
        start: 0,
    };
    for (dim, (offset, size)) in offsets.iter().zip(sizes).enumerate() {
        view = view.sliced(dim, *offset..offset + size, 1);
    }
    view.places()
}

fn within(drawn: &Tensor, bound: u64) -> Tensor {
    Tensor::from_fn(&drawn.shape, |at| drawn.elements[at] % bound.max(1))
}

fn constant(data: &TensorData, kind: Kind) -> Result<Tensor, String> {
    let elements: Vec<u64> = match kind {
        Kind::Float => data.iter::<f64>().map(of_number).collect(),
        Kind::Int => data.iter::<i64>().map(|element| element as u64).collect(),
        Kind::Bool => data.iter::<bool>().map(u64::from).collect(),
    };
    let shape: Vec<usize> = data.shape().to_vec();
    if elements.len() == shape.iter().product::<usize>() {
        Ok(Tensor::new(shape, elements))
    } else {
        Err(format!("its data has {} elements", elements.len()))
    }
}

/// Returns the number of valid indices of each input that is used as indices: the smallest over all its uses.
pub(super) fn bounds(graph: &Graph) -> BTreeMap<Arc<str>, usize> {
    let mut sources: HashMap<TensorId, Arc<str>> = HashMap::new();
    for id in graph.inputs() {
        if let Some(Role::Input(name)) = graph.value(*id).map(|value| &value.role) {
            sources.insert(*id, name.clone());
        }
    }
    let mut bounds: BTreeMap<Arc<str>, usize> = BTreeMap::new();
    for node in graph.nodes() {
        let passes_on = is(&node.operation, Trait::View) || is(&node.operation, Trait::Cast);
        let source = node.inputs().next().and_then(|id| sources.get(&id));
        if let (true, Some(source)) = (passes_on, source.cloned()) {
            sources.extend(node.outputs().map(|output| (output, source.clone())));
        }
        if let Some((indices, len)) = chosen(&node.operation)
            && let Some(source) = sources.get(&indices.id)
        {
            let bound = bounds.entry(source.clone()).or_insert(len);
            *bound = len.min(*bound);
        }
    }
    bounds
}

/// Returns the indices that an operation reads, and the size of the dim that they index.
fn chosen(operation: &OperationIr) -> Option<(&TensorIr, usize)> {
    use BaseOperationIr as Base;
    match operation {
        OperationIr::Custom(call) => {
            let kernel = FusedOperation::named(&call.id)?.record();
            let (input, len) = (kernel.check.indices)(call)?;
            Some((call.inputs.get(input)?, len))
        }
        OperationIr::Module(ModuleOperationIr::Embedding(op)) => {
            Some((&op.indices, op.weights.shape[0]))
        }
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            match op {
                Base::Select(op) => Some((&op.indices, op.tensor.shape[op.dim])),
                Base::Gather(op) => Some((&op.indices, op.tensor.shape[op.dim])),
                Base::Scatter(op) => Some((&op.indices, op.tensor.shape[op.dim])),
                Base::SelectAssign(op) => Some((&op.indices, op.tensor.shape[op.dim])),
                _ => None,
            }
        }
        _ => None,
    }
}
