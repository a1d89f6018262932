//! Starts Burn's loop with a strategy.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use burn::optim::ModuleOptimizer;
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLrScheduler;
use burn::train::logger::InMemoryMetricLogger;
use burn::train::renderer::CliMetricsRenderer;
use burn::train::{
    InferenceStep, Learner, LearnerModel, LearningResult, SupervisedTraining, TrainStep,
    TrainingStrategy,
};
use burn_fsdp_collectives::{LaunchError, ProcessGroup, ProcessMesh, processes};

use crate::eager;
use crate::lent::Lent;
use crate::outputs::Codecs;
use crate::portable::Portable;
use crate::rank::Start;
use crate::settings::Settings;
use crate::strategy::{Body, Left, Process, Silently, Strategy};
use burn_fsdp_glue::error::Error;

/// Runs Burn's loop, with ranks that are threads, or with this process as one rank.
pub(crate) fn run<M: LearnerModel, T: Send + 'static>(
    settings: &Settings,
    training: SupervisedTraining<Lent<M>>,
    model: M,
    (optimizer, rates): (ModuleOptimizer, ModuleLrScheduler),
    process: Option<Process<M>>,
    left: Left<T>,
    body: Body<M, T>,
) -> Result<LearningResult<Vec<T>>, Error> {
    if settings.ranks.ranks() == 0 {
        return Err(LaunchError::NoRanks.into());
    }
    if model.devices().iter().any(|device| !device.is_autodiff()) {
        return Err(Error::UntrackedInTraining);
    }
    let is_silent = process.as_ref().is_some_and(|process| process.rank > 0);
    let strategy = Strategy::new(settings.clone(), process, body, left.clone());
    let training = if is_silent {
        // Only rank 0 writes logs and renders.
        training
            .with_application_logger(None)
            .with_metric_logger(InMemoryMetricLogger::default())
            .renderer(Box::new(CliMetricsRenderer::new()))
            .with_training_strategy(TrainingStrategy::Custom(Arc::new(Silently(strategy))))
    } else {
        training.with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)))
    };
    let learner = Learner::new(Lent::new(model), optimizer, rates);
    // If a rank failed because the metrics thread has ended, Burn's loop panics at its end.
    let result = catch_unwind(AssertUnwindSafe(|| training.launch(learner)));
    let returned = left.outcome.lock().take().transpose()?;
    let result = match (result, &returned) {
        (Ok(result), _) => result,
        // Burn panics if it cannot read or load a checkpoint.
        (Err(panic), None) => {
            let reason = text(panic.as_ref());
            return Err(Error::NotStarted { reason });
        }
        (Err(panic), Some(_)) => resume_unwind(panic),
    };
    Ok(LearningResult {
        model: returned.expect("Burn's loop has had the ranks train"),
        renderer: result.renderer,
        interrupted: result.interrupted,
        error: result.error,
    })
}

/// Returns the message of a panic.
fn text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&'static str>().copied());
    text.unwrap_or("a panic without a message").to_owned()
}

/// Returns the function that trains on each rank by the eager engine, and then calls `end` with the mesh and its
/// shards.
pub(crate) fn by_the_eager_engine<M: LearnerModel, T>(
    end: impl Fn(&ProcessMesh, M, ModuleOptimizer) -> Result<T, Error> + Send + Sync + 'static,
) -> Body<M, T> {
    Arc::new(move |world: &ProcessGroup, start: Start<M>| {
        let (mesh, model, optimizer) = eager::train(world, start)?;
        end(&mesh, model, optimizer)
    })
}

/// Checks that ranks can be threads, because no launcher has started the program several times. `instead` is the function
/// for processes.
pub(crate) fn check_threads(instead: &'static str) -> Result<(), Error> {
    match processes()? {
        None => Ok(()),
        Some(found) => Err(Error::TrainingAmongProcesses {
            launcher: found.launcher.to_owned(),
            processes: found.size,
            instead,
        }),
    }
}

/// Returns this process as a rank, if a launcher has started several.
pub(crate) fn process<M: LearnerModel>() -> Result<Option<Process<M>>, Error>
where
    <M as TrainStep>::Output: Portable,
    <M as InferenceStep>::Output: Portable,
{
    let process = processes()?.map(|found| Process {
        rank: found.rank,
        codecs: Codecs::new(),
    });
    Ok(process)
}
