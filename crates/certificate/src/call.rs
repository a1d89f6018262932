//! Calls of operations on exact tensors.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash as _, Hasher};

use burn::tensor::DType;
use burn_fsdp_mesh::{Cut, Layout, Mesh, Placement};
use burn_ir::{IrVisitorMut, OperationIr, ScalarIr, TensorId, TensorIr, TensorStatus};

use super::field::{Element, Hash};
use super::given::cut;
use super::scalar::Scalar;
use super::tensor::{Kind, Tensor, filled};
use burn_fsdp_spmd::graph::{Draw, Node, operation_name};

/// The tensors of one rank.
pub(super) type Values = HashMap<TensorId, Tensor>;

/// Facts, recorded during a run, that arithmetic in the field cannot express.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// Each probability by its logarithm, recorded when a log-softmax is computed.
    pub(super) logarithms: RefCell<HashMap<Element, Element>>,
    /// Names of the operations that were treated as uninterpreted functions of whole tensors.
    pub(super) opaque: RefCell<BTreeSet<String>>,
}

/// An operation on one rank, with the values that it reads.
pub(super) struct Call<'a> {
    pub(super) node: &'a Node,
    pub(super) values: &'a Values,
    pub(super) scalars: Vec<Scalar>,
    pub(super) place: Place<'a>,
    pub(super) known: &'a Known,
}

/// The rank and the run of an operation, which determine its random numbers.
pub(super) struct Place<'a> {
    pub(super) mesh: &'a Mesh,
    pub(super) rank: usize,
    /// Number of the run. Each run draws new random numbers.
    pub(super) run: u64,
    /// The placements of random values if the ranks share one joined batch; otherwise every rank draws its own numbers.
    pub(super) draws: Option<&'a BTreeMap<TensorId, Vec<Placement>>>,
}

impl Call<'_> {
    /// Returns a tensor that the operation reads.
    pub(super) fn get(&self, tensor: &TensorIr) -> Result<&Tensor, String> {
        let id = tensor.id;
        self.values
            .get(&id)
            .ok_or_else(|| format!("it reads %{}, which does not exist", id.value()))
    }

    /// Returns the scalar at this index.
    pub(super) fn scalar(&self, index: usize) -> Result<Scalar, String> {
        let scalar = self.scalars.get(index).copied();
        scalar.ok_or_else(|| format!("it has no scalar {index}"))
    }

    /// Evaluates the operation as an uninterpreted function of its operands, each taken as a whole.
    pub(super) fn opaque(&self) -> Result<Vec<Tensor>, String> {
        let name = operation_name(&self.node.operation);
        let mut hash = Hash::named(&name);
        self.known.opaque.borrow_mut().insert(name);
        hash.write(parameters_of(&self.node.operation));
        for input in self.node.operation.inputs() {
            hash.write(self.get(input)?.hash());
        }
        Ok(self.drawn_from(hash))
    }

    /// Evaluates the operation as an uninterpreted function of each plane. A plane is a channel of a sample, as
    /// numbered by the first two dims, and a result depends only on the same plane of the operands.
    pub(super) fn by_plane(&self) -> Result<Vec<Tensor>, String> {
        let operation = &self.node.operation;
        let name = operation_name(operation);
        let mut seed = Hash::named(&name);
        seed.write(parameters_with(operation, |tensor| {
            tensor.shape.iter_mut().take(2).for_each(|size| *size = 1);
        }));
        let inputs = operation.inputs().map(|input| self.get(input));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let planes = |shape: &[usize]| shape.iter().take(2).product::<usize>();
        let num_planes = inputs.first().map_or(0, |input| planes(&input.shape));
        let outputs = operation.outputs().enumerate().map(|(number, output)| {
            let shape = output.shape.as_slice();
            let mut alike = inputs.iter().map(|input| planes(&input.shape));
            if alike.any(|other| other != num_planes) || planes(shape) != num_planes {
                return Err("its operands have different numbers of planes".to_owned());
            }
            let elements = (0..num_planes).flat_map(|plane| {
                let mut seed = seed;
                seed.write(number as u64);
                for input in &inputs {
                    let len = input.len() / num_planes;
                    let own = &input.elements[plane * len..][..len];
                    own.iter().for_each(|element| seed.write(*element));
                }
                let own = filled(seed, &shape[2..], Kind::of(output.dtype));
                own.elements.to_vec()
            });
            Ok(Tensor::new(shape, elements.collect()))
        });
        outputs.collect()
    }

    /// Returns random results, which depend on the node and the run. Each rank draws separately; with a joined batch,
    /// it has its part of one draw.
    pub(super) fn drawn(&self) -> Result<Vec<Tensor>, String> {
        let Place {
            mesh,
            rank,
            run,
            draws,
        } = &self.place;
        let mut seed = Hash::named("random");
        seed.write(*run);
        if let Some(draw) = self.node.draw.as_ref().filter(|draw| !draw.is_own) {
            seed.write(u64::from(draw.number));
            return self.part_of(draw, seed);
        }
        let first = self.node.outputs().next();
        seed.write(first.map_or(0, |id| id.value()));
        let Some(draws) = draws else {
            seed.write(*rank as u64);
            return Ok(self.drawn_from(seed));
        };
        let outputs = self.node.operation.outputs().enumerate();
        let parts = outputs.map(|(number, output)| {
            let mut seed = seed;
            seed.write(number as u64);
            let shape = output.shape.as_slice();
            let kind = Kind::of(output.dtype);
            match draws.get(&output.id) {
                None => Ok(filled(seed, shape, kind)),
                Some(placements) => {
                    let layout = Layout {
                        placements: placements.clone(),
                        cut: Cut::Dims,
                        owner: None,
                    };
                    let whole = filled(seed, &whole_shape(shape, placements, mesh), kind);
                    cut((&whole, kind), &layout, mesh, *rank, shape)
                }
            }
        });
        parts.collect()
    }

    /// Returns the rank's part of a tensor that all ranks draw together.
    fn part_of(&self, draw: &Draw, seed: Hash) -> Result<Vec<Tensor>, String> {
        let Place { mesh, rank, .. } = self.place;
        let start = draw.start(|axis| {
            let index = mesh.index_on(axis, rank);
            index.map_err(|error| error.to_string())
        })?;
        let parts = self.node.operation.outputs().map(|output| {
            let whole = filled(seed, &draw.whole, Kind::of(output.dtype));
            let mut view = whole.view();
            for (dim, (start, size)) in start.iter().zip(output.shape.as_slice()).enumerate() {
                if start + size > draw.whole[dim] {
                    return Err("it draws more than the whole tensor".to_owned());
                }
                view = view.sliced(dim, *start..start + size, 1);
            }
            Ok(whole.taken(&view))
        });
        parts.collect()
    }

    fn drawn_from(&self, seed: Hash) -> Vec<Tensor> {
        let outputs = self.node.operation.outputs().enumerate();
        outputs
            .map(|(number, output)| {
                let mut seed = seed;
                seed.write(number as u64);
                filled(seed, output.shape.as_slice(), Kind::of(output.dtype))
            })
            .collect()
    }
}

/// Returns the shape of the whole tensor from the shape of a part, which is the same on all ranks.
fn whole_shape(part: &[usize], placements: &[Placement], mesh: &Mesh) -> Vec<usize> {
    let mut shape = part.to_vec();
    for (placement, axis) in placements.iter().zip(mesh.axes()) {
        if let Placement::Shard(dim) = placement {
            shape[*dim] *= axis.size;
        }
    }
    shape
}

/// Returns a hash of an operation's parameters (dims, strides, numbers) and its tensors' shapes.
fn parameters_of(operation: &OperationIr) -> u64 {
    parameters_with(operation, |_| {})
}

/// Like [`parameters_of`], after applying `change` to the tensors.
fn parameters_with(operation: &OperationIr, change: impl FnMut(&mut TensorIr)) -> u64 {
    struct Neutral<F>(F);
    impl<F: FnMut(&mut TensorIr)> IrVisitorMut for Neutral<F> {
        fn visit_tensor_mut(&mut self, tensor: &mut TensorIr) {
            (self.0)(tensor);
            tensor.id = TensorId::new(0);
            tensor.status = TensorStatus::ReadOnly;
            tensor.dtype = DType::F32;
        }
        fn visit_scalar_mut(&mut self, scalar: &mut ScalarIr) {
            *scalar = ScalarIr::Float(scalar.elem());
        }
    }
    let mut operation = operation.clone();
    operation.visit_mut(&mut Neutral(change));
    let mut hasher = DefaultHasher::new();
    operation.hash(&mut hasher);
    hasher.finish()
}
