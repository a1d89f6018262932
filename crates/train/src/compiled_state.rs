//! The checkpoints of Burn's loop, from and to a compiled step. Rank 0 holds one whole tensor at a time.

use std::collections::BTreeMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bool, DType, Int, Shape, Tensor, TensorData};
use burn_fsdp_collectives::{Fingerprint, FullPart, ProcessGroup, Source};
use burn_fsdp_spmd::trace::ParameterSpec;
use burn_fsdp_spmd::{BackendIr, Batch, CompiledStep, OptimizerState};
use burn_pack::Scalar;

use crate::filed::{Filed, FiledState, FiledTensor};
use crate::notes::exchanged;
use crate::scratch::{Pile, Scratch};
use crate::staging::{Recorded, Staged, written};
use crate::whole_state::{Told, broadcast, check_none_left, told};
use burn_fsdp_glue::dtype::{burn_dtype, element_of};
use burn_fsdp_glue::error::{CheckpointError, Error, optimizer_error};
use burn_fsdp_glue::optimizer_record::{OptimizerParts, RANK_KEY, state_name};
use burn_fsdp_glue::piecewise::{only, without};
use burn_fsdp_glue::snapshot::Elements;

/// The tensors of a module, in module order.
pub(crate) struct Fields(Vec<Field>);

/// A tensor of a module.
struct Field {
    path: String,
    id: ParamId,
    value: Value,
}

/// Where a tensor's value is, and how it is recorded.
enum Value {
    /// In the step. A layer may record another form than it computes with.
    Computed {
        recorded: Box<dyn Fn(TensorData) -> TensorData + Send>,
    },
    /// In the module: integers, booleans, and floats that the step does not have.
    Own(TensorData),
}

impl Fields {
    /// Describes the tensors of a module that `step` trains. Lazy parameters stay lazy.
    pub(crate) fn of<M: Module, B: Batch, Be: BackendIr, O>(
        model: &M,
        step: &CompiledStep<B, Be, O>,
    ) -> Self {
        let mut describe = Describe {
            place: Vec::new(),
            computed: step
                .parameters()
                .iter()
                .flat_map(|spec| std::iter::once(&spec.path).chain(&spec.tied))
                .map(|path| path.to_string())
                .collect(),
            fields: Vec::new(),
        };
        model.visit(&mut describe);
        Self(describe.fields)
    }

    /// Checks that all ranks have the same values of the integer and boolean tensors.
    ///
    /// Collective.
    pub(crate) fn check_same(&self, world: &ProcessGroup) -> Result<(), Error> {
        let own: Vec<_> = self.own().map(|(path, data)| (path, bits(data))).collect();
        let all = exchanged(world, "values of a model", &Fingerprint::of(&own))?;
        let what = "the values of integer and boolean tensors";
        match all.iter().position(|other| *other != all[world.rank()]) {
            Some(rank) => Err(Error::OtherTraining { what, rank }),
            None => Ok(()),
        }
    }

    /// Returns the paths and values of the tensors whose values are in the module.
    pub(crate) fn own(&self) -> impl Iterator<Item = (&str, &TensorData)> {
        self.0.iter().filter_map(|field| match &field.value {
            Value::Own(data) => Some((&*field.path, data)),
            Value::Computed { .. } => None,
        })
    }

    /// Returns the paths of the tensors that the step has.
    pub(crate) fn computed(&self) -> impl Iterator<Item = &str> {
        let is_computed = |field: &&Field| matches!(field.value, Value::Computed { .. });
        self.0.iter().filter(is_computed).map(|field| &*field.path)
    }
}

/// Returns the bits of a tensor's values, independent of its type.
fn bits(data: &TensorData) -> Vec<u64> {
    if data.dtype().is_float() {
        data.iter::<f64>().map(f64::to_bits).collect()
    } else {
        data.iter::<i64>().map(i64::cast_unsigned).collect()
    }
}

struct Describe {
    place: Vec<String>,
    computed: Vec<String>,
    fields: Vec<Field>,
}

impl Describe {
    fn add(&mut self, id: ParamId, value: Value) {
        let path = self.place.join(".");
        self.fields.push(Field { path, id, value });
    }
}

impl ModuleVisitor for Describe {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.place.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.place.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.computed.contains(&self.place.join(".")) {
            let own = param.transform_for_save().val().into_data();
            return self.add(param.id, Value::Own(own));
        }
        // Burn's own loading shows the mappers without initializing the parameter.
        let device = param.lazy_device();
        let none = Tensor::<D>::full([1; D], 0.0, &device).expand(param.lazy_shape());
        let (_, _, mapper) = param.clone().transform_for_load(none, param.id).consume();
        let recorded = Box::new(move |data: TensorData| {
            let dtype = data.dtype();
            let value = Tensor::<D>::from_data(data, (&device, dtype));
            mapper.on_save(value).into_data()
        });
        self.add(param.id, Value::Computed { recorded });
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let own = param.transform_for_save().val().into_data();
        self.add(param.id, Value::Own(own));
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        let own = param.transform_for_save().val().into_data();
        self.add(param.id, Value::Own(own));
    }
}

/// Gathers the record of the model and the optimizer's state, tensor by tensor, into files on rank 0; other ranks have
/// no files.
///
/// Collective.
pub(crate) fn staged<B: Batch, Be: BackendIr, O>(
    step: &mut CompiledStep<B, Be, O>,
    fields: &Fields,
    files: Option<Scratch>,
) -> Result<Option<Staged>, Error> {
    let mut recorded = files.as_ref().map(Recorded::new).transpose()?;
    for field in &fields.0 {
        let data = match &field.value {
            Value::Computed { recorded: form } => {
                let whole = step.parameter(&field.path)?;
                recorded.is_some().then(|| form(whole))
            }
            Value::Own(data) => Some(data.clone()),
        };
        if let Some((recorded, data)) = recorded.as_mut().zip(data) {
            recorded.add(field.path.clone(), field.id, &data)?;
        }
    }
    let record = recorded.map(written).transpose()?;
    let mut pile = files
        .as_ref()
        .map(|files| files.pile("states"))
        .transpose()?;
    let mut states = Filed::default();
    for field in &fields.0 {
        if matches!(field.value, Value::Computed { .. }) {
            let state = state_of(step, &field.path, pile.as_mut())?;
            if let Some(state) = state {
                states.insert(field.id.val(), state);
            }
        }
    }
    let Some((files, record)) = files.zip(record) else {
        return Ok(None);
    };
    Ok(Some(Staged {
        record,
        optimizer: states.into_optimizer()?,
        files,
    }))
}

/// Returns the whole optimizer state of a parameter on rank 0, if it has one, with its tensors in the file.
///
/// Collective.
fn state_of<B: Batch, Be: BackendIr, O>(
    step: &mut CompiledStep<B, Be, O>,
    path: &str,
    pile: Option<&mut Pile>,
) -> Result<Option<FiledState>, Error> {
    let mut specs = step.parameters().iter();
    let Some(spec) = specs.find(|spec| *spec.path == *path && spec.is_trained) else {
        return Ok(None);
    };
    let dims = spec.shape.len();
    let tensors = step.states(path)?;
    let scalars = step.counters(path).unwrap_or_default().to_vec();
    let Some(pile) = pile.filter(|_| !tensors.is_empty() || !scalars.is_empty()) else {
        return Ok(None);
    };
    let mut state = FiledState {
        dims,
        group_path: Some(path.to_owned()),
        scalars,
        tensors: Vec::new(),
    };
    for (field, data) in tensors {
        state.tensors.push(FiledTensor {
            field,
            dtype: data.dtype(),
            shape: data.shape().to_vec(),
            bytes: pile.add(data.as_bytes())?,
        });
    }
    Ok(Some(state))
}

/// Continues from a checkpoint that rank 0 has loaded into `model` and `whole`. Rank 0 reads them tensor by tensor.
/// `fields` describes the model.
///
/// Collective.
pub(crate) fn resume<M: Module, B: Batch, Be: BackendIr, O>(
    step: &mut CompiledStep<B, Be, O>,
    world: &ProcessGroup,
    fields: &Fields,
    (model, whole): (M, Option<ModuleOptimizer>),
) -> Result<(), Error> {
    let mut readers = Readers::default();
    if world.rank() == 0 {
        model.visit(&mut readers);
    }
    // The readers have what they read. Nothing waits for other ranks during a visit, because modules that are threads'
    // clones of one module share the locks of its running states.
    drop(model);
    let mut resumed = Resumed {
        world,
        readers: readers.found,
        whole,
        states: Vec::new(),
        steps: 0,
    };
    for spec in step.parameters().to_vec() {
        match fields.own().find(|(path, _)| **path == *spec.path) {
            // Every rank has loaded them.
            Some((path, own)) => {
                step.set_parameter(path, own.clone().convert_dtype(spec.dtype))?;
            }
            None => resumed.parameter(step, &spec)?,
        }
    }
    if let Some(rest) = resumed.whole {
        check_none_left(&rest)?;
    }
    Ok(step.resume_with(resumed.steps, resumed.states)?)
}

/// Reads a tensor's value, which may be in a file.
type Read = Box<dyn FnOnce() -> TensorData>;

/// A visitor that collects the readers of a module's float tensors, with their ids, by path. It reads nothing.
#[derive(Default)]
struct Readers {
    place: Vec<String>,
    found: BTreeMap<String, (ParamId, Read)>,
}

impl ModuleVisitor for Readers {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.place.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.place.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (id, own) = (param.id, param.clone());
        let read = Box::new(move || own.base().into_data());
        self.found.insert(self.place.join("."), (id, read));
    }
}

/// What a step continues from. The readers and the states of whole parameters are on rank 0.
struct Resumed<'a> {
    world: &'a ProcessGroup,
    readers: BTreeMap<String, (ParamId, Read)>,
    whole: Option<ModuleOptimizer>,
    states: Vec<OptimizerState>,
    steps: u64,
}

impl Resumed<'_> {
    /// Continues one parameter. Its value is freed before the next one is read.
    ///
    /// Collective.
    fn parameter<B: Batch, Be: BackendIr, O>(
        &mut self,
        step: &mut CompiledStep<B, Be, O>,
        spec: &ParameterSpec,
    ) -> Result<(), Error> {
        let path = &*spec.path;
        let paths = std::iter::once(path).chain(spec.tied.iter().map(|path| &**path));
        let found: Vec<_> = paths.filter_map(|path| self.readers.remove(path)).collect();
        let ids: Vec<_> = found.iter().map(|(id, _)| id.val()).collect();
        let value = found.into_iter().next().map(|(_, read)| read());
        if value.is_none() && self.world.rank() == 0 {
            return Err(CheckpointError::Record {
                reason: format!("it has no `{path}`"),
            }
            .into());
        }
        let value = sent(
            self.world,
            path.to_owned(),
            value,
            (&spec.shape, spec.dtype),
        )?;
        step.set_parameter(path, value)?;
        let (id, parts) = self.parts_of(&ids)?;
        let own = match &parts {
            Some(parts) => told(parts, id, path)?,
            None => Told::default(),
        };
        let told = exchanged(self.world, "state of a parameter", &own)?.swap_remove(0);
        if told.is_empty() {
            return Ok(());
        }
        if !spec.is_trained {
            return Err(optimizer_error(format!(
                "its checkpoint has a state of `{path}`, which this model does not train"
            ))
            .into());
        }
        let (state, count) = state_in(step, self.world, (path, id), (told, parts.as_ref()))?;
        self.steps = self.steps.max(count);
        self.states.push(state);
        Ok(())
    }

    /// Takes the state of a parameter out, on rank 0, with the id under which it was. A tied parameter may have had
    /// several ids, of which one has a state.
    fn parts_of(&mut self, ids: &[u64]) -> Result<(u64, Option<OptimizerParts>), Error> {
        for id in ids {
            let Some(all) = self.whole.take() else {
                break;
            };
            let parts = OptimizerParts::take(&only(&all, [*id]))?;
            self.whole = Some(without(all, [*id]));
            if !parts.tensors.is_empty() || !parts.scalars.is_empty() {
                return Ok((*id, Some(parts)));
            }
        }
        Ok((0, None))
    }
}

/// Receives the state of a parameter from rank 0. Returns this rank's part, and the number of steps that it counts.
///
/// Collective.
fn state_in<B: Batch, Be: BackendIr, O>(
    step: &CompiledStep<B, Be, O>,
    world: &ProcessGroup,
    (path, id): (&str, u64),
    (told, parts): (Told, Option<&OptimizerParts>),
) -> Result<(OptimizerState, u64), Error> {
    let mut tensors = Vec::new();
    for tensor in &told.tensors {
        let name = state_name(path, &tensor.field);
        let whole = parts.and_then(|parts| parts.tensor(id, &tensor.field));
        let bytes = whole.map(|whole| whole.to_bytes().map_err(optimizer_error));
        let dtype = burn_dtype(&name, tensor.dtype)?;
        let value = bytes.transpose()?;
        let value = value.map(|bytes| TensorData::from_bytes(bytes, tensor.shape.clone(), dtype));
        let whole = sent(world, name, value, (&tensor.shape, dtype))?;
        let part = step.part_of_state(path, &tensor.field, &whole)?;
        tensors.push((tensor.field.clone(), part));
    }
    let scalars = told.scalars.into_iter();
    let counters: Vec<(String, Scalar)> = scalars
        .filter(|(name, _)| name != RANK_KEY)
        .map(|(name, number)| (name, number.into()))
        .collect();
    let counts = counters.iter().filter_map(|(_, scalar)| match scalar {
        Scalar::UInt(count) => Some(*count),
        Scalar::Int(count) => u64::try_from(*count).ok(),
        Scalar::Float(_) | Scalar::Bool(_) => None,
    });
    let steps = counts.max().unwrap_or(0);
    let path = path.to_owned();
    let state = OptimizerState {
        path,
        counters,
        tensors,
    };
    Ok((state, steps))
}

/// Sends a tensor from rank 0 to all ranks.
///
/// Collective.
fn sent(
    world: &ProcessGroup,
    name: String,
    own: Option<TensorData>,
    (shape, dtype): (&[usize], DType),
) -> Result<TensorData, CheckpointError> {
    let element = element_of(&name, burn_fsdp_glue::dtype::dtype_of(&name, dtype)?)?;
    let elements = shape.iter().product();
    let own = own.map_or_else(Source::empty, |data| {
        Source::new(Elements(data.into_bytes()))
    });
    let source = broadcast(world, name, own, FullPart::absent(elements, element))?;
    let bytes = source.as_bytes().to_vec();
    Ok(TensorData::from_bytes_vec(
        bytes,
        Shape::from(shape.to_vec()),
        dtype,
    ))
}
