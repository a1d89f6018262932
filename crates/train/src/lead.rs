//! Rank 0's work for all ranks: events, checkpoints, and early stopping.

use std::sync::Arc;

use burn::train::metric::store::EventStoreClient;
use burn::train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, Interrupter, Learner, LearnerEvent,
    LearnerModel, LearningCheckpointer, SupervisedTrainingEventProcessor,
};
use parking_lot::Mutex;

use crate::lent::Lent;
use crate::outputs::Outputs;
use crate::scratch::Scratch;

type Processor<M> = SupervisedTrainingEventProcessor<Lent<M>>;

/// The parts of Burn's loop that only rank 0 runs.
pub(crate) struct Lead<M: LearnerModel> {
    pub(crate) processor: Arc<Mutex<Option<Processor<M>>>>,
    pub(crate) outputs: Arc<Outputs<M>>,
    pub(crate) interrupter: Interrupter,
    pub(crate) checkpointer: Option<LearningCheckpointer<Lent<M>>>,
    pub(crate) early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    pub(crate) store: Arc<EventStoreClient>,
    /// The files of the last save, which the checkpointer's threads may still read.
    pub(crate) staged: Option<Scratch>,
}

impl<M: LearnerModel> Lead<M> {
    fn processor(&self, event: impl FnOnce(&mut Processor<M>, &Interrupter)) {
        if let Some(processor) = self.processor.lock().as_mut() {
            event(processor, &self.interrupter);
        }
    }

    pub(crate) fn begin_training(&self, epoch_number: usize, total_items: usize) {
        let event = LearnerEvent::StartSplit {
            epoch_number,
            total_items,
        };
        self.processor(|to, interrupter| interrupter.fail_on_error(to.process_train(event)));
    }

    pub(crate) fn end_training(&self, epoch: usize) {
        self.processor(|to, interrupter| {
            interrupter.fail_on_error(to.process_train(LearnerEvent::EndSplit(epoch)));
        });
    }

    pub(crate) fn begin_validation(&self, epoch_number: usize, total_items: usize) {
        let event = LearnerEvent::StartSplit {
            epoch_number,
            total_items,
        };
        self.processor(|to, interrupter| interrupter.fail_on_error(to.process_valid(event)));
    }

    pub(crate) fn end_validation(&self, epoch: usize) {
        let has_readers = self.checkpointer.is_some() || self.early_stopping.is_some();
        self.processor(|to, interrupter| {
            interrupter.fail_on_error(to.process_valid(LearnerEvent::EndSplit(epoch)));
            interrupter.fail_on_error(to.process_train(LearnerEvent::EndEpoch(epoch)));
            if has_readers {
                interrupter.fail_on_error(to.flush());
            }
        });
    }

    /// Passes each rank's next output to the metrics, in rank order. A rank may be ahead. Returns false if there was
    /// nothing to pass on.
    pub(crate) fn pass_on(&self) -> bool {
        let mut any = false;
        self.processor(|to, interrupter| {
            for item in self.outputs.training.take() {
                any = true;
                let event = LearnerEvent::ProcessedItem(item);
                interrupter.fail_on_error(to.process_train(event));
            }
            for item in self.outputs.validation.take() {
                any = true;
                let event = LearnerEvent::ProcessedItem(item);
                interrupter.fail_on_error(to.process_valid(event));
            }
        });
        any
    }

    /// Saves the epoch if a checkpoint is due. `learner` already has the state to save, and `staged` holds its files.
    pub(crate) fn save(&mut self, learner: &Learner<Lent<M>>, epoch: usize, staged: Scratch) {
        let Some(checkpointer) = &mut self.checkpointer else {
            return;
        };
        checkpointer.checkpoint(learner, epoch, &self.store);
        if Lent::is_recorded(learner) {
            // Each thread takes a record after it has written the previous one, so the previous files are no longer
            // needed.
            self.staged = Some(staged);
        }
    }

    /// Returns true if the user's early stopping ends the training after this epoch.
    pub(crate) fn ends_early(&mut self, epoch: usize) -> bool {
        let early = self.early_stopping.as_mut();
        early.is_some_and(|early| early.should_stop(epoch, &self.store))
    }

    /// Waits until the metrics have processed all outputs, and the last checkpoint is written.
    pub(crate) fn end(self) {
        self.processor(|to, interrupter| interrupter.fail_on_error(to.flush()));
        drop(self.checkpointer);
        drop(self.staged);
    }
}
