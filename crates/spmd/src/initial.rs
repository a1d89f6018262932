//! Initial values, one parameter at a time: sent from rank 0 to all ranks, or read by each rank for itself.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::iter;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn_fsdp_collectives::{BufferPool, Part, Partition, Pending, ProcessGroup};
use burn_fsdp_mesh::{Layout, Region};
use burn_fsdp_tensors as tensors;
use burn_ir::TensorId;

use crate::error::Error;
use crate::graph::{Graph, Parameter};
use crate::panics::caught;
use crate::parts::{Divided, broadcast, element_of};
use crate::ranks::Ranks;
use crate::trace::ParameterSpec;

/// A function that returns the layout of a module's tensor before the graph exists.
pub(crate) type LayoutOf<'a> = dyn Fn(&ParameterSpec) -> Result<Layout, Error> + 'a;

/// A tensor of a module whose initial value is requested, and this rank's part of it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ShardSpec<'a> {
    /// The spec of the whole tensor.
    pub whole: &'a ParameterSpec,
    /// The elements of the whole tensor that this rank holds, possibly none.
    pub region: Region,
    /// The shape of this rank's part. It has one dim if the tensor is divided into flat shards.
    pub shape: Vec<usize>,
}

/// Values of a module's tensors before there is a graph, each divided according to its layout.
#[derive(Debug)]
pub(crate) struct InitialValues {
    values: BTreeMap<Arc<str>, Held>,
}

#[derive(Debug)]
struct Held {
    spec: ParameterSpec,
    layout: Layout,
    data: TensorData,
}

impl InitialValues {
    /// Returns this rank's part of every tensor: the part that `read` returns, or else its part of the value that
    /// `init` creates on rank 0. Values that are read are not created.
    pub(crate) fn new<M: Module, E: From<Error>>(
        (init, read): (
            impl Fn(&Device) -> M,
            impl FnMut(&ShardSpec<'_>) -> Result<Option<TensorData>, E>,
        ),
        specs: &[ParameterSpec],
        layout: &LayoutOf<'_>,
        ranks: &Ranks,
        device: &Device,
    ) -> Result<Self, E> {
        let mut receiver = Receiver {
            read,
            specs,
            layout,
            ranks,
            path: Vec::new(),
            values: BTreeMap::new(),
            made: BTreeMap::new(),
            error: None,
        };
        if ranks.rank() == 0 {
            // With autodiff, as in Burn's own training, because some modules require gradients.
            let device = device.clone().autodiff();
            // Parameters are replaced as they are visited, so only one exists at a time.
            let made = caught(|| init(&device).map(&mut receiver));
            if let Err(panic) = made {
                let reason = panic.text();
                return Err(Error::Initialization { reason }.into());
            }
        } else {
            // In the order in which rank 0 visits the parameters, because each may need a collective.
            for spec in specs {
                receiver.receive(spec, || None);
            }
        }
        match receiver.error {
            Some(error) => Err(error),
            None => Ok(Self {
                values: receiver.values,
            }),
        }
    }

    /// Returns rank 0's values of these tensors, which all ranks hold whole. All ranks must call it.
    pub(crate) fn of_rank_0(
        values: impl IntoIterator<Item = (ParameterSpec, TensorData)>,
        ranks: &Ranks,
    ) -> Result<Self, Error> {
        let layout = Layout::replicated(&ranks.mesh()?);
        let values = values.into_iter().map(|(spec, data)| {
            let divided = Divided {
                shape: &spec.shape,
                layout: &layout,
                ranks,
            };
            let data = sent(&spec, &divided, (ranks.rank() == 0).then_some(data))?;
            let (path, layout) = (spec.path.clone(), layout.clone());
            Ok((path, Held { spec, layout, data }))
        });
        let values = values.collect::<Result<_, Error>>()?;
        Ok(Self { values })
    }

    /// Returns these values combined with others.
    pub(crate) fn and(mut self, others: Self) -> Self {
        self.values.extend(others.values);
        self
    }

    /// Gathers a whole parameter. All ranks must call it.
    pub(crate) fn whole(&self, path: &str, ranks: &Ranks) -> Result<TensorData, Error> {
        let held = self.held(path)?;
        held.divided(ranks).whole(path, &held.data)
    }

    /// Returns this rank's part of a tensor, padded.
    pub(crate) fn local(&self, path: &str) -> Result<TensorData, Error> {
        Ok(self.held(path)?.data.clone())
    }

    pub(crate) fn set(&mut self, path: &str, data: TensorData, ranks: &Ranks) -> Result<(), Error> {
        let local = self.held(path)?.divided(ranks).localize(&data)?;
        if let Some(held) = self.values.get_mut(path) {
            held.data = local;
        }
        Ok(())
    }

    /// Returns the layout of a tensor.
    pub(crate) fn layout(&self, path: &str) -> Result<&Layout, Error> {
        Ok(&self.held(path)?.layout)
    }

    /// Sets this rank's part of a tensor, padded.
    pub(crate) fn set_local(&mut self, path: &str, data: TensorData) -> Result<(), Error> {
        self.held(path)?;
        if let Some(held) = self.values.get_mut(path) {
            held.data = data;
        }
        Ok(())
    }

    fn held(&self, path: &str) -> Result<&Held, Error> {
        let held = self.values.get(path);
        held.ok_or_else(|| Error::Internal(format!("parameter {path} has no value")))
    }

    /// Returns the values, divided as the graph divides its parameters. All ranks must call it if the graph divides
    /// them differently than before. Only one parameter at a time is then whole.
    pub(crate) fn into_values(
        mut self,
        graph: &Graph,
        ranks: &Ranks,
    ) -> Result<Vec<(TensorId, TensorData)>, Error> {
        let parameters = graph.parameters().iter();
        let values = parameters.map(|parameter| {
            let data = self.take(parameter, ranks)?;
            Ok((parameter.value, data))
        });
        values.collect()
    }

    /// Removes a value, and returns it in the layout that the parameter has in the graph.
    /// [`set_local`](Self::set_local) restores it. All ranks must call it if the layouts differ.
    pub(crate) fn take(
        &mut self,
        parameter: &Parameter,
        ranks: &Ranks,
    ) -> Result<TensorData, Error> {
        let held = self.values.get_mut(&parameter.path);
        let held = held
            .ok_or_else(|| Error::Internal(format!("parameter {} has no value", parameter.path)))?;
        if held.data.dtype() != parameter.dtype {
            return Err(Error::mismatch(
                "parameter",
                parameter.path.to_string(),
                (&parameter.shape, parameter.dtype),
                &held.data,
            ));
        }
        let empty = TensorData::from_bytes_vec(Vec::new(), [0], parameter.dtype);
        let data = std::mem::replace(&mut held.data, empty);
        let layout = std::mem::replace(&mut held.layout, parameter.layout.clone());
        let from = Divided {
            shape: &held.spec.shape,
            layout: &layout,
            ranks,
        };
        from.relaid(&parameter.path, data, &parameter.layout)
    }
}

impl Held {
    fn divided<'a>(&'a self, ranks: &'a Ranks) -> Divided<'a> {
        Divided {
            shape: &self.spec.shape,
            layout: &self.layout,
            ranks,
        }
    }
}

struct Receiver<'a, R, E> {
    read: R,
    specs: &'a [ParameterSpec],
    layout: &'a LayoutOf<'a>,
    ranks: &'a Ranks,
    path: Vec<String>,
    values: BTreeMap<Arc<str>, Held>,
    /// Hashes of the values of parameters that several fields share.
    made: BTreeMap<Arc<str>, u64>,
    error: Option<E>,
}

impl<R, E> Receiver<'_, R, E>
where
    R: FnMut(&ShardSpec<'_>) -> Result<Option<TensorData>, E>,
    E: From<Error>,
{
    fn visit(&mut self, data: impl FnOnce() -> TensorData) {
        let path = self.path.join(".");
        let specs = self.specs;
        let spec = specs.iter().find(|spec| *spec.path == *path);
        match spec {
            Some(spec) if spec.tied.is_empty() => self.receive(spec, || Some(data())),
            Some(spec) => {
                let mut hash = None;
                self.receive(spec, || {
                    let data = data();
                    hash = Some(hash_of(&data));
                    Some(data)
                });
                self.made.extend(hash.map(|hash| (spec.path.clone(), hash)));
            }
            None => self.compare(&path, data),
        }
    }

    /// Rejects a field whose value differs from the initial value of the parameter that it shares.
    fn compare(&mut self, path: &str, data: impl FnOnce() -> TensorData) {
        let is_of = |spec: &&ParameterSpec| spec.tied.iter().any(|tied| **tied == *path);
        let first = self.specs.iter().find(is_of);
        let made = first.and_then(|first| Some((&first.path, *self.made.get(&first.path)?)));
        if let Some((first, hash)) = made
            && self.error.is_none()
            && hash_of(&data()) != hash
        {
            let problem = "but have different values; create the second by cloning the first when the module is built";
            self.error = Some(tied(first, path, problem).into());
        }
    }

    /// Reads this rank's part under every path of a parameter, and returns the first one found. All parts must be
    /// equal.
    fn read_of(
        &mut self,
        spec: &ParameterSpec,
        shard: &ShardSpec<'_>,
    ) -> Result<Option<TensorData>, E> {
        let mut known: Option<(Arc<str>, TensorData)> = None;
        for path in iter::once(&spec.path).chain(&spec.tied) {
            let path = path.clone();
            let whole = ParameterSpec {
                path,
                ..spec.clone()
            };
            let asked = ShardSpec {
                whole: &whole,
                ..shard.clone()
            };
            match (&known, (self.read)(&asked)?) {
                (Some((first, one)), Some(other)) if one.as_bytes() != other.as_bytes() => {
                    let problem = "but the values read for them differ; read only one name, or the same values for both";
                    return Err(tied(first, &whole.path, problem).into());
                }
                (None, Some(data)) => known = Some((whole.path, data)),
                _ => {}
            }
        }
        Ok(known.map(|(_, data)| data))
    }

    fn receive(&mut self, spec: &ParameterSpec, data: impl FnOnce() -> Option<TensorData>) {
        if self.error.is_some() {
            return;
        }
        match self.try_receive(spec, data) {
            Ok(held) => {
                self.values.insert(spec.path.clone(), held);
            }
            Err(error) => self.error = Some(error),
        }
    }

    fn try_receive(
        &mut self,
        spec: &ParameterSpec,
        data: impl FnOnce() -> Option<TensorData>,
    ) -> Result<Held, E> {
        let layout = (self.layout)(spec)?;
        let divided = Divided {
            shape: &spec.shape,
            layout: &layout,
            ranks: self.ranks,
        };
        let shard = asked(spec, &divided)?;
        let data = match self.read_of(spec, &shard)? {
            Some(data) => {
                let (path, expected) =
                    (spec.path.to_string(), (shard.shape.as_slice(), spec.dtype));
                if data.shape().to_vec() != shard.shape || data.dtype() != spec.dtype {
                    return Err(Error::mismatch("shard", path, expected, &data).into());
                }
                divided.padded(data)?
            }
            None => sent(spec, &divided, data())?,
        };
        Ok(Held {
            spec: spec.clone(),
            layout,
            data,
        })
    }
}

fn hash_of(data: &TensorData) -> u64 {
    let mut hasher = DefaultHasher::new();
    (data.shape().as_slice(), data.as_bytes()).hash(&mut hasher);
    hasher.finish()
}

fn tied(first: &str, second: &str, problem: &'static str) -> Error {
    Error::Tied {
        first: first.to_owned(),
        second: second.to_owned(),
        problem,
    }
}

/// Describes this rank's part of a tensor whose value is requested.
fn asked<'a>(spec: &'a ParameterSpec, divided: &Divided<'_>) -> Result<ShardSpec<'a>, Error> {
    let (mesh, rank) = (divided.ranks.mesh()?, divided.ranks.rank());
    let region = if divided.layout.is_whole() {
        Region::whole(&spec.shape)
    } else {
        divided.layout.region(&spec.shape, &mesh, rank)?
    };
    Ok(ShardSpec {
        whole: spec,
        region,
        shape: divided.part_shape()?,
    })
}

/// Sends rank 0's value to all ranks, and returns this rank's part, padded.
fn sent(
    spec: &ParameterSpec,
    divided: &Divided<'_>,
    data: Option<TensorData>,
) -> Result<TensorData, Error> {
    let (path, known) = (&spec.path, (spec.shape.as_slice(), spec.dtype));
    if let Some(data) = &data
        && (data.dtype() != spec.dtype || data.shape().to_vec() != spec.shape)
    {
        return Err(Error::mismatch("parameter", path.to_string(), known, data));
    }
    let Some(partition) = divided.partition()? else {
        let data = broadcast(divided.ranks.group(), path, data, known)?;
        return divided.localize(&data);
    };
    let copies = divided.copies()?;
    let shape = divided.held_shape(partition)?;
    let is_first = copies.iter().all(|group| group.rank() == 0);
    let mut data = if is_first {
        Some(scattered(
            spec,
            data,
            (partition, &shape),
            divided.flat_group()?,
        )?)
    } else {
        None
    };
    // The ranks that received parts send them to the other ranks that hold the same parts.
    for copies in copies {
        let known = (shape.as_slice(), spec.dtype);
        let own = (copies.rank() == 0).then_some(data).flatten();
        let held = broadcast(copies, path, own, known)?;
        data = Some(owned(&held));
    }
    data.ok_or_else(|| Error::Internal(format!("no rank has parameter {path}")))
}

/// Copies a tensor into separate memory.
fn owned(data: &TensorData) -> TensorData {
    TensorData::from_bytes_vec(
        data.as_bytes().to_vec(),
        data.shape().to_vec(),
        data.dtype(),
    )
}

/// Scatters the value of the group's first rank, and returns this rank's part, padded to the given shape.
fn scattered(
    spec: &ParameterSpec,
    data: Option<TensorData>,
    (partition, shape): (Partition, &[usize]),
    group: &ProcessGroup,
) -> Result<TensorData, Error> {
    let element = element_of(&spec.path, spec.dtype)?;
    let size = spec.dtype.size();
    let part = match data {
        Some(data) => Part::new(tensors::data_source(data), partition, element),
        None => Part::absent(partition, element),
    };
    let into = BufferPool::new().take(partition.len(group.rank()) * size);
    let label = format!("initial {}", spec.path);
    // Waits until the other ranks have read it, because the next value must not be created before then.
    let received = group
        .start_scatter(label, Vec::new(), 0, vec![part], vec![into])
        .and_then(Pending::wait_released)
        .map_err(Error::among_ranks)?;
    let num_bytes = shape.iter().product::<usize>() * size;
    let mut bytes = Vec::with_capacity(num_bytes);
    bytes.extend_from_slice(received.buffers[0].as_ref());
    bytes.resize(num_bytes, 0);
    Ok(TensorData::from_bytes_vec(bytes, shape, spec.dtype))
}

impl<R, E> ModuleMapper for Receiver<'_, R, E>
where
    R: FnMut(&ShardSpec<'_>) -> Result<Option<TensorData>, E>,
    E: From<Error>,
{
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let id = param.id;
        let stand_in = Tensor::<D>::zeros([1; D], &param.lazy_device());
        // A lazy parameter whose value is read is never initialized.
        self.visit(|| param.into_value().into_data());
        Param::initialized(id, stand_in)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        self.visit(|| param.base().into_data());
        param
    }

    fn map_bool<const D: usize>(
        &mut self,
        param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        self.visit(|| param.base().into_data());
        param
    }

    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
}
