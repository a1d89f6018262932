//! Initial values: from rank 0 to all, one parameter at a time.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn_fsdp_collectives::{Part, Source};
use burn_ir::TensorId;

use crate::error::Error;
use crate::graph::{Graph, ParameterLayout};
use crate::panics::caught;
use crate::parts::{broadcast, element_of, localize, whole};
use crate::ranks::Ranks;
use crate::trace::ParameterSpec;

/// How ranks divide a tensor of the module before there is a graph.
pub(crate) type LayoutOf<'a> = dyn Fn(&ParameterSpec) -> Result<ParameterLayout, Error> + 'a;

/// Values of a module's tensors before there is a graph: each as its layout divides it.
#[derive(Debug)]
pub(crate) struct InitialValues {
    values: BTreeMap<Arc<str>, Held>,
}

#[derive(Debug, Clone)]
struct Held {
    spec: ParameterSpec,
    layout: ParameterLayout,
    data: TensorData,
}

impl InitialValues {
    /// What `init` gives on rank 0, on all ranks, as `layout` says of each tensor.
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

    /// The whole parameter, on all ranks.
    pub(crate) fn whole(&self, path: &str, ranks: &Ranks) -> Result<TensorData, Error> {
        let held = self.held(path)?;
        whole(ranks, path, &held.data, &held.layout, &held.spec.shape)
    }

    /// This rank's part, padded.
    pub(crate) fn local(&self, path: &str) -> Result<TensorData, Error> {
        Ok(self.held(path)?.data.clone())
    }

    pub(crate) fn set(&mut self, path: &str, data: TensorData, ranks: &Ranks) -> Result<(), Error> {
        let layout = self.held(path)?.layout.clone();
        if let Some(held) = self.values.get_mut(path) {
            held.data = localize(&data, &layout, ranks)?;
        }
        Ok(())
    }

    /// How this rank holds it.
    pub(crate) fn layout(&self, path: &str) -> Result<&ParameterLayout, Error> {
        Ok(&self.held(path)?.layout)
    }

    /// Sets this rank's part, padded.
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

    /// The values as a graph lays them out.
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
            let data = match held.layout == parameter.layout {
                true => held.data,
                false => {
                    let shape = &held.spec.shape;
                    let all = whole(ranks, &parameter.path, &held.data, &held.layout, shape)?;
                    localize(&all, &parameter.layout, ranks)?
                }
            };
            values.push((parameter.value, data));
        }
        Ok(values)
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
        let ParameterLayout::Flat(partition) = layout else {
            let data = broadcast(group, &spec.path, data, (&spec.shape, spec.dtype))?;
            return Ok(Held {
                spec: spec.clone(),
                data: localize(&data, &layout, self.ranks)?,
                layout,
            });
        };
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
        Ok(Held {
            spec: spec.clone(),
            layout: ParameterLayout::Flat(partition),
            data: TensorData::from_bytes_vec(bytes, [partition.chunk_len()], spec.dtype),
        })
    }
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
