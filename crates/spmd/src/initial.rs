//! Initial values, sent from rank 0 to all ranks, one parameter at a time.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn_fsdp_collectives::{Part, ProcessGroup, Source};
use burn_fsdp_mesh::{Layout, Partition};
use burn_ir::TensorId;

use crate::error::Error;
use crate::graph::Graph;
use crate::panics::caught;
use crate::parts::{Divided, broadcast, element_of};
use crate::ranks::Ranks;
use crate::trace::ParameterSpec;

/// A function from a tensor of the module to its layout before there is a graph.
pub(crate) type LayoutOf<'a> = dyn Fn(&ParameterSpec) -> Result<Layout, Error> + 'a;

/// Values of a module's tensors before there is a graph, each divided as its layout says.
#[derive(Debug, Clone)]
pub(crate) struct InitialValues {
    values: BTreeMap<Arc<str>, Held>,
}

#[derive(Debug, Clone)]
struct Held {
    spec: ParameterSpec,
    layout: Layout,
    data: TensorData,
}

impl InitialValues {
    /// Gives all ranks the values that `init` makes on rank 0, divided as `layout` says of each tensor.
    pub(crate) fn new<M: Module>(
        init: impl Fn(&Device) -> M,
        specs: &[ParameterSpec],
        layout: &LayoutOf<'_>,
        ranks: &Ranks,
        device: &Device,
    ) -> Result<Self, Error> {
        let mut receiver = Receiver {
            specs,
            layout,
            ranks,
            path: Vec::new(),
            values: BTreeMap::new(),
            error: None,
        };
        match ranks.rank() == 0 {
            true => {
                // On the tape, as for Burn's own training: some modules ask for gradients.
                let device = device.clone().autodiff();
                // Parameters are replaced as they are visited, so that only one is there at a time.
                let made = caught(|| init(&device).map(&mut receiver));
                if let Err(panic) = made {
                    let reason = panic.text();
                    return Err(Error::Initialization { reason });
                }
            }
            false => {
                for spec in specs {
                    receiver.receive(spec, None);
                }
            }
        }
        match receiver.error {
            Some(error) => Err(error),
            None => Ok(Self {
                values: receiver.values,
            }),
        }
    }

    /// Returns the whole parameter, on all ranks.
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

    /// Returns the values, divided as the graph divides its parameters.
    pub(crate) fn into_values(
        mut self,
        graph: &Graph,
        ranks: &Ranks,
    ) -> Result<Vec<(TensorId, TensorData)>, Error> {
        let mut values = Vec::new();
        for parameter in graph.parameters() {
            let held = self.values.remove(&parameter.path);
            let held = held.ok_or_else(|| {
                Error::Internal(format!("parameter {} has no value", parameter.path))
            })?;
            if held.data.dtype() != parameter.dtype {
                return Err(Error::mismatch(
                    "parameter",
                    parameter.path.to_string(),
                    (&parameter.shape, parameter.dtype),
                    &held.data,
                ));
            }
            let is_same = held.layout == parameter.layout
                || held.layout.is_whole() && parameter.layout.is_whole();
            let data = match is_same {
                true => held.data,
                false => {
                    let all = held.divided(ranks).whole(&parameter.path, &held.data)?;
                    let divided = Divided {
                        shape: &parameter.shape,
                        layout: &parameter.layout,
                        ranks,
                    };
                    divided.localize(&all)?
                }
            };
            values.push((parameter.value, data));
        }
        Ok(values)
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

struct Receiver<'a> {
    specs: &'a [ParameterSpec],
    layout: &'a LayoutOf<'a>,
    ranks: &'a Ranks,
    path: Vec<String>,
    values: BTreeMap<Arc<str>, Held>,
    error: Option<Error>,
}

impl Receiver<'_> {
    fn visit(&mut self, data: impl FnOnce() -> TensorData) {
        let path = self.path.join(".");
        let specs = self.specs;
        let spec = specs.iter().find(|spec| *spec.path == *path);
        let (Some(spec), None) = (spec, &self.error) else {
            return;
        };
        self.receive(spec, Some(data()));
    }

    fn receive(&mut self, spec: &ParameterSpec, data: Option<TensorData>) {
        match self.try_receive(spec, data) {
            Ok(held) => {
                self.values.insert(spec.path.clone(), held);
            }
            Err(error) => self.error = Some(self.error.take().unwrap_or(error)),
        }
    }

    fn try_receive(&self, spec: &ParameterSpec, data: Option<TensorData>) -> Result<Held, Error> {
        if let Some(data) = &data
            && (data.dtype() != spec.dtype || data.shape().to_vec() != spec.shape)
        {
            return Err(Error::mismatch(
                "parameter",
                spec.path.to_string(),
                (&spec.shape, spec.dtype),
                data,
            ));
        }
        let group = self.ranks.group();
        let layout = (self.layout)(spec)?;
        let divided = Divided {
            shape: &spec.shape,
            layout: &layout,
            ranks: self.ranks,
        };
        let Some(partition) = divided.partition()? else {
            let data = broadcast(group, &spec.path, data, (&spec.shape, spec.dtype))?;
            return Ok(Held {
                spec: spec.clone(),
                data: divided.localize(&data)?,
                layout,
            });
        };
        let copies = divided.copies()?;
        let mut data = match copies.iter().all(|group| group.rank() == 0) {
            true => Some(shard(spec, data, partition, divided.flat_group()?)?),
            false => None,
        };
        // The ranks that have divided the values hand them to those that hold the same parts.
        for copies in copies {
            let known = (&[partition.chunk_len()][..], spec.dtype);
            let own = (copies.rank() == 0).then_some(data).flatten();
            data = Some(broadcast(copies, &spec.path, own, known)?);
        }
        let data = data.ok_or_else(|| {
            Error::Internal(format!("parameter {} has come to no rank", spec.path))
        })?;
        Ok(Held {
            spec: spec.clone(),
            layout,
            data,
        })
    }
}

/// Returns this rank's flat shard, padded, of the values that the first rank of the group has.
fn shard(
    spec: &ParameterSpec,
    data: Option<TensorData>,
    partition: Partition,
    group: &ProcessGroup,
) -> Result<TensorData, Error> {
    let element = element_of(&spec.path, spec.dtype)?;
    let size = spec.dtype.size();
    let part = match data {
        Some(data) => Part::new(Source::new(data.as_bytes().to_vec()), partition, element),
        None => Part::absent(partition, element),
    };
    let into = group.pool().take(partition.len(group.rank()) * size);
    let label = format!("initial {}", spec.path);
    let received = group
        .scatter(label, Vec::new(), 0, vec![part], vec![into])
        .map_err(Error::among_ranks)?;
    let mut bytes = received.buffers[0].as_ref().to_vec();
    bytes.resize(partition.chunk_len() * size, 0);
    let shape = [partition.chunk_len()];
    Ok(TensorData::from_bytes_vec(bytes, shape, spec.dtype))
}

impl ModuleMapper for Receiver<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let id = param.id;
        let device = param.lazy_device();
        let tensor = param.into_value();
        let stand_in = Tensor::<D>::zeros([1; D], &device);
        self.visit(|| tensor.into_data());
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
