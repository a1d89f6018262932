//! A step over several micro-batches.

use std::sync::Arc;

use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn_fsdp_collectives::Fingerprint;
use burn_ir::BackendIr;

use super::agree::agree;
use super::cache::{Compiled, Made};
use super::step::{CompiledStep, Outputs, grad_norm};
use crate::error::Error;
use crate::graph::Graph;
use crate::mode::Purpose;
use crate::run::{Results, Timeline};
use crate::trace::{Batch, StepScalars};

/// The graphs that a step over micro-batches runs.
struct Prepared {
    /// The graph of each micro-batch.
    graphs: Vec<Arc<Graph>>,
    update: Arc<Graph>,
    made: Made,
    scalars: StepScalars,
}

impl<B: Batch, Be: BackendIr, O> CompiledStep<B, Be, O> {
    /// Runs one train step over several micro-batches. Their gradients are averaged and clipped, and then the optimizer
    /// runs once. Returns the mean of their losses. All ranks must call it, with the same number of micro-batches and
    /// equal shapes across ranks. Micro-batches of one rank may have different shapes.
    ///
    /// Each rank keeps only the sum of its part of the gradients. Each micro-batch runs the collectives of a step.
    ///
    /// # Errors
    ///
    /// [`Error::NoBatch`] if there are none; [`Error::MicroBatches`] if they produce gradients for different
    /// parameters; the errors of [`step`](Self::step).
    pub fn step_accumulated(
        &mut self,
        rates: impl Into<ModuleLearningRate>,
        batches: &[B],
    ) -> Result<f64, Error> {
        self.run_micro(&rates.into(), batches, None)
    }

    /// Runs [`step_accumulated`](Self::step_accumulated) and records its timeline.
    ///
    /// # Errors
    ///
    /// Same as [`step_accumulated`](Self::step_accumulated).
    pub fn step_accumulated_with_timeline(
        &mut self,
        rates: impl Into<ModuleLearningRate>,
        batches: &[B],
    ) -> Result<(f64, Timeline), Error> {
        let mut timeline = Timeline::new();
        let loss = self.run_micro(&rates.into(), batches, Some(&mut timeline))?;
        Ok((loss, timeline))
    }

    pub(super) fn run_micro(
        &mut self,
        rates: &ModuleLearningRate,
        batches: &[B],
        mut timeline: Option<&mut Timeline>,
    ) -> Result<f64, Error> {
        match batches {
            [] => {
                // Tells the other ranks, so they do not wait. The last step stays pending, because the others may
                // finish it later.
                let group = self.mode.ranks().group();
                let _ = agree::<B>(group, None, rates, None);
                self.expect_defined()?;
                return Err(Error::NoBatch);
            }
            [batch] if self.done.scaler.is_none() => {
                return self.run(rates, batch, timeline);
            }
            _ => {}
        }
        let prepared = self.prepare_micro(rates, batches)?;
        if let Some(timeline) = timeline.as_deref_mut() {
            *timeline = Timeline::new();
        }
        let scalars = &prepared.scalars;
        let mut total = 0.0;
        let mut outputs: Vec<Outputs> = Vec::new();
        for (graph, batch) in prepared.graphs.iter().zip(batches) {
            self.feed(graph, batch);
            let micro = u32::try_from(outputs.len()).unwrap_or(u32::MAX);
            self.executor.draw_for(self.done.steps, micro);
            let ran = self.run_graph(graph, scalars, timeline.as_deref_mut());
            let results = ran.inspect_err(|error| self.poison_after(outputs.len(), error))?;
            let loss = results.loss.as_ref();
            let loss = loss.and_then(|loss| loss.iter::<f64>().next());
            total += loss.ok_or_else(|| Error::Internal("the loss is empty".to_owned()))?;
            outputs.push((graph.template(), results.outputs));
        }
        let unscaled = self.unscale(&prepared.update);
        let is_taken = unscaled.inspect_err(|error| self.poison_after(outputs.len(), error))?;
        self.done.grad_norm = None;
        if is_taken {
            let ran = self.run_graph(&prepared.update, scalars, timeline);
            let results = ran.inspect_err(|error| self.poison_after(outputs.len(), error))?;
            let stepped = &prepared.made.stepped;
            self.scalars
                .advance(scalars, |path| stepped.contains_key(path));
            self.done.grad_norm = grad_norm(&results);
        }
        self.forget_pending(&prepared.update);
        self.done.steps += 1;
        self.done.outputs = outputs;
        self.vanished()?;
        Ok(total / batches.len() as f64)
    }

    fn run_graph(
        &mut self,
        graph: &Arc<Graph>,
        scalars: &StepScalars,
        timeline: Option<&mut Timeline>,
    ) -> Result<Results, Error> {
        self.load(graph);
        self.executor.run(graph, scalars, timeline)
    }

    /// Records that values are in an undefined state. Once `num_batches` is not zero, this holds for every error,
    /// because these micro-batches have changed running statistics.
    fn poison_after(&mut self, num_batches: usize, error: &Error) {
        match num_batches {
            0 => self.poison(error),
            _ => self.poisoned = Some(error.to_string()),
        }
    }

    /// Returns the graph of the first of the given micro-batches, without the optimizer.
    pub(super) fn micro_graph(
        &mut self,
        rates: &ModuleLearningRate,
        batches: &[B],
    ) -> Result<Arc<Graph>, Error> {
        let graphs = self.prepare_micro(rates, batches)?.graphs;
        graphs.into_iter().next().ok_or(Error::NoBatch)
    }

    /// Returns the graphs for the given micro-batches. All ranks must call it. The ranks agree on all graphs before
    /// anything changes, with one exchange of 8 bytes for each micro-batch.
    fn prepare_micro(
        &mut self,
        rates: &ModuleLearningRate,
        batches: &[B],
    ) -> Result<Prepared, Error> {
        let purpose = Purpose::Micro(batches.len());
        let was_open = self.mode.is_open();
        let defined = self.expect_defined();
        let scalars = defined.and_then(|()| self.scalars.peek(rates));
        // Zero without scalars, because this rank then reports that it is not ready.
        let of_scalars = scalars.as_ref().map_or(0, StepScalars::fingerprint);
        let given = self.given();
        let said = |own: &Made| Fingerprint::of(&(own.fingerprint, of_scalars, given));
        let mut made: Vec<Made> = Vec::new();
        for batch in batches {
            let own = scalars.clone().and_then(|scalars| {
                let own = self.compiled(purpose, batch, &scalars)?;
                check_alike(made.first(), &own)?;
                Ok(own)
            });
            let one_of = (batch, batches.len());
            let own = self.agreed(own, said, rates, one_of);
            made.push(own.inspect_err(|_| self.reopen(was_open))?);
        }
        let mut graphs = Vec::new();
        let mut last = None;
        for (index, made) in made.iter().enumerate() {
            let Compiled::Micro {
                first,
                next,
                update,
            } = &made.compiled
            else {
                return Err(Error::Internal("a micro-batch has a whole step".to_owned()));
            };
            graphs.push(match index {
                0 => first.clone(),
                _ => next.clone(),
            });
            last = Some((update.clone(), made.clone()));
        }
        let (update, made) = last.ok_or(Error::NoBatch)?;
        // Finishes the previous step if it is pending, because its pending gradients have the same ids. All ranks do
        // so, now that they agree.
        self.flush()?;
        for graph in &graphs {
            self.begin(graph)?;
        }
        Ok(Prepared {
            graphs,
            update,
            made,
            scalars: scalars?,
        })
    }
}

/// Rejects a micro-batch whose parameters with gradients differ from the first one's, because the sums would be
/// incomplete.
fn check_alike(first: Option<&Made>, own: &Made) -> Result<(), Error> {
    let Some(first) = first.filter(|first| first.stepped != own.stepped) else {
        return Ok(());
    };
    let (first, own) = (&first.stepped, &own.stepped);
    let mut paths = first.keys().chain(own.keys());
    let differs = paths.find(|path| first.get(*path) != own.get(*path));
    Err(Error::MicroBatches {
        path: differs.map_or_else(String::new, ToString::to_string),
    })
}
