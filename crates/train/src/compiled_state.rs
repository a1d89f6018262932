//! The checkpoints of Burn's loop, from and to a compiled step. Rank 0 holds one whole tensor at a time.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::ModuleOptimizer;
use burn::tensor::{Bool, DType, Device, Int, Shape, Tensor, TensorData};
use burn_fsdp_collectives::{Fingerprint, FullPart, ProcessGroup, Source};
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
    /// In the module: the step does not have it.
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

    /// Checks that all ranks have the same values of the tensors that the step does not have.
    ///
    /// Collective.
    pub(crate) fn check_same(&self, world: &ProcessGroup) -> Result<(), Error> {
        let own: Vec<_> = self.own().collect();
        let own: Vec<_> = own
            .iter()
            .map(|(path, data)| (path, data.as_bytes()))
            .collect();
        let all = exchanged(world, "values of a model", &Fingerprint::of(&own))?;
        let what = "the values of the tensors that are not trained";
        match all.iter().position(|other| *other != all[world.rank()]) {
            Some(rank) => Err(Error::OtherTraining { what, rank }),
            None => Ok(()),
        }
    }

    /// Checks that the tensors that the step does not have are those of `made`, which the step has been compiled with.
    pub(crate) fn check_own(&self, made: &Self) -> Result<(), Error> {
        match self.own().zip(made.own()).find(|(own, made)| own != made) {
            Some(((path, _), _)) => Err(CheckpointError::Record {
                reason: format!(
                    "`{path}` differs from the value that `init` creates, which compiled steps use; have `init` create \
                     the checkpoint's value, or train with `FullySharded::launch`"
                ),
            }
            .into()),
            None => Ok(()),
        }
    }

    /// Returns the paths and values of the tensors that the step does not have.
    fn own(&self) -> impl Iterator<Item = (&str, &TensorData)> {
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
///
/// Collective.
pub(crate) fn resume<M: Module, B: Batch, Be: BackendIr, O>(
    step: &mut CompiledStep<B, Be, O>,
    world: &ProcessGroup,
    model: M,
    whole: Option<ModuleOptimizer>,
) -> Result<(), Error> {
    let mut resumed = Resumed {
        place: Vec::new(),
        world,
        step,
        whole,
        states: Vec::new(),
        steps: 0,
        failed: None,
    };
    drop(model.map(&mut resumed));
    let Resumed {
        whole,
        states,
        steps,
        failed,
        ..
    } = resumed;
    if let Some(error) = failed {
        return Err(error);
    }
    if let Some(rest) = whole {
        check_none_left(&rest)?;
    }
    Ok(step.resume_with(steps, states)?)
}

/// A mapper that gives a step the values and states of a module's float tensors, in module order. A tensor that was read
/// from a file is freed when the next one is read.
struct Resumed<'a, B: Batch, Be: BackendIr, O> {
    place: Vec<String>,
    world: &'a ProcessGroup,
    step: &'a mut CompiledStep<B, Be, O>,
    /// On rank 0: the states of the tensors that have not been visited.
    whole: Option<ModuleOptimizer>,
    states: Vec<OptimizerState>,
    steps: u64,
    failed: Option<Error>,
}

impl<B: Batch, Be: BackendIr, O> Resumed<'_, B, Be, O> {
    /// Continues one parameter. `read` returns its value, and is called on rank 0.
    ///
    /// Collective.
    fn parameter(&mut self, id: ParamId, read: impl FnOnce() -> TensorData) -> Result<(), Error> {
        let path = self.place.join(".");
        let mut specs = self.step.parameters().iter();
        let Some(spec) = specs.find(|spec| *spec.path == *path) else {
            return Ok(());
        };
        let is_trained = spec.is_trained;
        let (shape, dtype) = (spec.shape.clone(), spec.dtype);
        let value = (self.world.rank() == 0).then(read);
        let value = sent(self.world, path.clone(), value, (&shape, dtype))?;
        self.step.set_parameter(&path, value)?;
        let parts = match self.whole.take() {
            Some(all) => {
                let parts = OptimizerParts::take(&only(&all, [id.val()]))?;
                self.whole = Some(without(all, [id.val()]));
                Some(parts)
            }
            None => None,
        };
        let own = match &parts {
            Some(parts) => told(parts, id.val(), &path)?,
            None => Told::default(),
        };
        let told = exchanged(self.world, "state of a parameter", &own)?.swap_remove(0);
        if told.is_empty() {
            return Ok(());
        }
        if !is_trained {
            return Err(optimizer_error(format!(
                "its checkpoint has a state of `{path}`, which this model does not train"
            ))
            .into());
        }
        let of = (path.as_str(), id.val());
        let (state, count) = state_in(self.step, self.world, of, (told, parts.as_ref()))?;
        self.steps = self.steps.max(count);
        self.states.push(state);
        Ok(())
    }
}

impl<B: Batch, Be: BackendIr, O> ModuleMapper for Resumed<'_, B, Be, O> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.place.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.place.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let id = param.id;
        if self.failed.is_none() {
            let read = || param.base().into_data();
            self.failed = self.parameter(id, read).err();
        }
        Param::initialized(id, Tensor::full([1; D], 0.0, &Device::flex()))
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
