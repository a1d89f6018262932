//! The model of Burn's learner, which the ranks borrow for a run.

use std::fmt;
use std::sync::Arc;

use burn::module::{Devices, Module, ModuleMapper, ModuleVisitor};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::store::ModuleRecord;
use burn::tensor::Device;
use burn::train::{InferenceStep, Learner, LearnerModel, TrainOutput, TrainStep};
use parking_lot::{Mutex, MutexGuard};

use burn_fsdp_glue::optimizer_record::emptied;

/// A model in Burn's learner during a sharded training run. It holds the model before and after the run, but not while
/// the ranks use it.
///
/// Programs need not name it: the type of the `SupervisedTraining` for
/// [`FullySharded::launch`](crate::FullySharded::launch) follows from the model's.
///
/// A learner exposes its optimizer only to its model, in [`TrainStep::optimize`], and gets the state to save from the
/// model, with [`Module::into_record`]. Both therefore pass through this type.
#[derive(Clone)]
pub struct Lent<M> {
    /// `None` while the ranks have it.
    model: Option<M>,
    /// The description of the model in the summary.
    text: Arc<str>,
    counter: Arc<Mutex<Counter<M>>>,
}

/// Values that pass between a learner and the ranks.
struct Counter<M> {
    /// To the ranks: the model, and the optimizer with its state.
    out: Option<(Option<M>, ModuleOptimizer)>,
    /// To the learner: the optimizer for its checkpoint.
    optimizer: Option<ModuleOptimizer>,
    /// To the learner: the record of the model for its checkpoint.
    record: Option<ModuleRecord>,
    /// True if the record was taken.
    is_recorded: bool,
}

impl<M: LearnerModel> Lent<M> {
    pub(crate) fn new(model: M) -> Self {
        Self::holding(Some(model), "")
    }

    /// Returns a placeholder for a trained model; a summary shows `text`.
    pub(crate) fn gone(text: &str) -> Self {
        Self::holding(None, text)
    }

    fn holding(model: Option<M>, text: &str) -> Self {
        let counter = Counter {
            out: None,
            optimizer: None,
            record: None,
            is_recorded: false,
        };
        Self {
            model,
            text: text.into(),
            counter: Arc::new(Mutex::new(counter)),
        }
    }

    /// Takes model and optimizer out of a learner, which keeps its learning-rate schedule.
    pub(crate) fn take_from(learner: &mut Learner<Self>) -> Option<(M, ModuleOptimizer)> {
        let (model, optimizer) = Self::handed_out(learner)?;
        Self::clear(learner);
        Some((model?, optimizer))
    }

    /// Passes a learner the state to save: the model's record, and the optimizer with its whole state.
    pub(crate) fn put_into(
        learner: &mut Learner<Self>,
        record: ModuleRecord,
        optimizer: ModuleOptimizer,
    ) {
        let lent = learner.model();
        let mut counter = lent.counter();
        counter.record = Some(record);
        counter.is_recorded = false;
        counter.optimizer = Some(optimizer);
        drop(counter);
        learner.optimizer_step(GradientsParams::new());
    }

    /// Returns true if a learner's checkpointers have taken the state to save.
    pub(crate) fn is_recorded(learner: &Learner<Self>) -> bool {
        learner.model().counter().is_recorded
    }

    /// Releases the state that a learner has saved.
    pub(crate) fn clear(learner: &mut Learner<Self>) {
        learner.model().counter().record = None;
        if let Some((_, optimizer)) = Self::handed_out(learner) {
            learner.model().counter().optimizer = Some(emptied(&optimizer));
            learner.optimizer_step(GradientsParams::new());
        }
    }

    /// Makes a learner release its model and a copy of its optimizer.
    fn handed_out(learner: &mut Learner<Self>) -> Option<(Option<M>, ModuleOptimizer)> {
        learner.optimizer_step(GradientsParams::new());
        learner.model().counter().out.take()
    }

    fn counter(&self) -> MutexGuard<'_, Counter<M>> {
        self.counter.lock()
    }

    /// Changes the model, unless the ranks have it.
    fn with(self, change: impl FnOnce(M) -> M) -> Self {
        Self {
            model: self.model.map(change),
            text: self.text,
            counter: self.counter,
        }
    }

    fn here(&self) -> &M {
        let model = self.model.as_ref();
        model.expect("the loop of each rank steps with the model that it has")
    }
}

impl<M: LearnerModel> TrainStep for Lent<M> {
    type Input = <M as TrainStep>::Input;
    type Output = <M as TrainStep>::Output;

    fn step(&self, item: Self::Input) -> TrainOutput<Self::Output> {
        TrainStep::step(self.here(), item)
    }

    /// Releases model and optimizer, or accepts an optimizer: a learner exposes its optimizer only here.
    fn optimize(
        mut self,
        optimizer: &mut ModuleOptimizer,
        _rates: ModuleLearningRate,
        _gradients: GradientsParams,
    ) -> Self {
        let model = self.model.take();
        let mut counter = self.counter();
        match counter.optimizer.take() {
            Some(put) => *optimizer = put,
            None => counter.out = Some((model, optimizer.clone())),
        }
        drop(counter);
        self
    }
}

impl<M: LearnerModel> InferenceStep for Lent<M> {
    type Input = <M as InferenceStep>::Input;
    type Output = <M as InferenceStep>::Output;

    fn step(&self, item: Self::Input) -> Self::Output {
        InferenceStep::step(self.here(), item)
    }
}

impl<M: LearnerModel> Module for Lent<M> {
    fn collect_devices(&self, devices: Devices) -> Devices {
        match &self.model {
            Some(model) => model.collect_devices(devices),
            None => devices,
        }
    }

    fn fork(self, device: &Device) -> Self {
        self.with(|model| model.fork(device))
    }

    fn to_device(self, device: &Device) -> Self {
        self.with(|model| model.to_device(device))
    }

    fn train(self) -> Self {
        self.with(M::train)
    }

    fn valid(&self) -> Self {
        Self {
            model: self.model.as_ref().map(M::valid),
            text: self.text.clone(),
            counter: self.counter.clone(),
        }
    }

    fn materialize(self) -> Self {
        self.with(M::materialize)
    }

    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        if let Some(model) = &self.model {
            model.visit(visitor);
        }
    }

    fn map<P: ModuleMapper>(self, mapper: &mut P) -> Self {
        self.with(|model| model.map(mapper))
    }

    fn into_record(self) -> ModuleRecord {
        let mut counter = self.counter();
        counter.is_recorded = true;
        let put = counter.record.clone();
        drop(counter);
        let own = || self.model.map(Module::into_record);
        put.or_else(own)
            .expect("a learner is saved when it has been given what it saves")
    }
}

impl<M: fmt::Debug> fmt::Debug for Lent<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lent").field(&self.model).finish()
    }
}

impl<M: fmt::Display> fmt::Display for Lent<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.model {
            Some(model) => model.fmt(f),
            None => f.write_str(&self.text),
        }
    }
}
