//! Steps that leave some of their nodes to the next step: the graph that runs these nodes together with the next step,
//! and the calls that run them earlier.

use std::num::NonZeroU64;

use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn_fsdp_collectives::Fingerprint;
use burn_ir::BackendIr;

use super::cache::{Compiled, Made};
use super::pending::{Pending, Prepared};
use super::step::CompiledStep;
use crate::error::Error;
use crate::graph::{Graph, Role};
#[cfg(doc)]
use crate::mode::Mode;
use crate::mode::Purpose;
use crate::trace::Batch;

impl<B: Batch, Be: BackendIr, O> CompiledStep<B, Be, O> {
    /// Runs [`step`](Self::step) completely, leaving no work for the next call. With
    /// [`OptimizerPlace::InNextForward`](crate::passes::schedule::OptimizerPlace::InNextForward), or if passes [move
    /// nodes](Mode::move_to_next_iteration), it also runs the part of this step that the next call would run. Calls
    /// that read or set parameters or states run it as well.
    ///
    /// # Errors
    ///
    /// Same as [`step`](Self::step).
    pub fn last_step(
        &mut self,
        rates: impl Into<ModuleLearningRate>,
        batch: &B,
    ) -> Result<f64, Error> {
        let loss = self.step(rates, batch)?;
        self.flush()?;
        Ok(loss)
    }

    /// Completes the last step, if some of its nodes run in the next one. A deferred optimizer runs without
    /// communication. If collectives were [moved](Mode::move_to_next_iteration), all ranks must call it.
    ///
    /// # Errors
    ///
    /// [`Error::Execution`], [`Error::Collective`], [`Error::Poisoned`].
    pub fn flush(&mut self) -> Result<(), Error> {
        self.expect_defined()?;
        let Some(pending) = self.pending.take() else {
            return Ok(());
        };
        let graph = pending.cleanup.graph.clone();
        self.load(&graph);
        self.executor.moved_scalars(None);
        let done = self.executor.run(&graph, &pending.scalars, None);
        if let Err(error) = done {
            self.poison(&error);
            // Nothing has run, so the work is still pending.
            self.pending = self.poisoned.is_none().then_some(pending);
            return Err(error);
        }
        self.forget_pending(&graph);
        Ok(())
    }

    /// Frees the pending values of a graph that has used them.
    pub(super) fn forget_pending(&mut self, graph: &Graph) {
        let gradients = graph.values().filter_map(|value| match value.role {
            Role::Pending(_) => Some(value.id),
            _ => None,
        });
        for id in gradients {
            self.executor.remove(id);
        }
    }

    /// Finishes the last step if it has been pending for as many steps as allowed.
    pub(super) fn flush_in_time(&mut self) -> Result<(), Error> {
        let is_due = |pending: &Pending| {
            let limit = pending.cleanup.max_iterations;
            limit.is_some_and(|limit: NonZeroU64| pending.age >= limit.get())
        };
        if self.pending.as_ref().is_some_and(is_due) {
            self.flush()
        } else {
            Ok(())
        }
    }

    /// Returns the graph for the given batch, created if necessary, and its scalars. All ranks must call it. The ranks
    /// agree on the graph before anything changes, with one exchange of 8 bytes.
    pub(super) fn prepare(
        &mut self,
        rates: &ModuleLearningRate,
        batch: &B,
    ) -> Result<Prepared, Error> {
        let was_open = self.mode.is_open();
        let prepared = self.prepare_own(rates, batch);
        // Scalars are included, because the optimizers' settings may differ.
        let given = self.given();
        let said =
            |own: &Prepared| Fingerprint::of(&(own.fingerprint, own.own.fingerprint(), given));
        let prepared = self.agreed(prepared, said, rates, (batch, 1));
        let prepared = prepared.inspect_err(|_| self.reopen(was_open))?;
        if prepared.flushes {
            self.flush()?;
        }
        self.begin(&prepared.graph)?;
        self.load(&prepared.graph);
        Ok(prepared)
    }

    /// Returns the graph and scalars that this rank would run, without communication. Changes no values.
    fn prepare_own(&mut self, rates: &ModuleLearningRate, batch: &B) -> Result<Prepared, Error> {
        self.expect_defined()?;
        let own = self.scalars.peek(rates)?;
        let made = self.compiled(Purpose::Step, batch, &own)?;
        let whole = |graph, fingerprint, stepped| Prepared {
            graph,
            fingerprint,
            scalars: own.clone(),
            before: None,
            own: own.clone(),
            stepped,
            flushes: false,
            pending: None,
        };
        let (setup, main, cleanup) = match made.compiled {
            Compiled::Whole(graph) => {
                return Ok(Prepared {
                    flushes: self.pending.is_some(),
                    ..whole(graph, made.fingerprint, made.stepped)
                });
            }
            Compiled::Micro { .. } => return Err(not_whole()),
            Compiled::Iteration {
                setup,
                main,
                cleanup,
            } => (setup, main, cleanup),
        };
        let left = |age| {
            Some(Pending {
                scalars: own.clone(),
                stepped: made.stepped.clone(),
                cleanup: cleanup.clone(),
                age,
            })
        };
        let stepped = made.stepped.clone();
        let Some(before) = &self.pending else {
            return Ok(Prepared {
                pending: left(1),
                ..whole(setup, made.fingerprint, stepped)
            });
        };
        let (age, scalars) = (before.age + 1, before.scalars.clone());
        // The pending work equals this graph's part of the previous step.
        if before.cleanup.fingerprint == cleanup.fingerprint {
            return Ok(Prepared {
                before: Some(scalars),
                pending: left(age),
                // `main` is a different graph from `setup`, which has the same key.
                ..whole(main, !made.fingerprint, stepped)
            });
        }
        // The pending optimizer step fits this graph, because both batches give gradients to the same parameters.
        if before.cleanup.is_optimizer && cleanup.is_optimizer && before.stepped == stepped {
            let Made {
                compiled,
                fingerprint,
                ..
            } = self.compiled(Purpose::Step, batch, &scalars)?;
            let Compiled::Iteration { main, .. } = compiled else {
                return Err(not_whole());
            };
            return Ok(Prepared {
                scalars: scalars.clone(),
                before: Some(scalars),
                pending: left(age),
                ..whole(main, !fingerprint, stepped)
            });
        }
        Ok(Prepared {
            flushes: true,
            pending: left(1),
            ..whole(setup, made.fingerprint, stepped)
        })
    }
}

fn not_whole() -> Error {
    Error::Internal("a step of one batch has graphs of another kind of step".to_owned())
}
