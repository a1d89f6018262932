//! The trace of an evaluation: a module's forward, off the tape.

use burn::module::Module;
use burn::tensor::Device;

use super::activation::Naming;
use super::batch::{self, Batch, JoinedShape, specs_of};
use super::builder::{Builder, Captures};
use super::capture::record_with;
use super::module::{computing, leaves, off_tape, running, with_fakes, with_marks};
use super::types::by_types;
use super::{TraceOptions, outputs};
use crate::error::Error;
use crate::graph::Graph;

/// Traces `forward` of the module that `init` makes, as Burn runs it for inference: no gradients, no dropout, running
/// statistics as they are. Returns what it returns, too, with small tensors in their places.
///
/// Parameters and buffers have the ids that they have in every graph of the model, and all other values ids that
/// no step has.
pub(crate) fn trace_forward<M, B, O>(
    init: impl Fn(&Device) -> M,
    forward: impl Fn(&M, B) -> O,
    batch: (&B, JoinedShape<'_>),
    options: &TraceOptions,
) -> Result<(Graph, O), Error>
where
    M: Module,
    B: Batch,
    O: Batch,
{
    // What a narrow trace would lose is found behind it, and is the error then.
    let recorded = |options: &TraceOptions| recorded(&init, &forward, batch, options);
    let (builder, template) = by_types(&init, options, recorded)?;
    Ok((builder.build_forward()?, template))
}

fn recorded<M, B, O>(
    init: impl Fn(&Device) -> M,
    forward: impl FnOnce(&M, B) -> O,
    (batch, joined): (&B, JoinedShape<'_>),
    options: &TraceOptions,
) -> Result<(Builder, O), Error>
where
    M: Module,
    B: Batch,
    O: Batch,
{
    let specs = specs_of(batch)?;
    let recording = record_with("the module", options.defaults, |device, progress| {
        let tracked = device.clone().autodiff();
        let known = with_fakes(init(&tracked), device, &tracked, &options.stored);
        let shapes = leaves(&known, None);
        let running = running(&with_marks(known, &tracked));
        // Made off the tape, with whatever tensors it has beside its parameters.
        let model = off_tape(init(device), device, &shapes);
        let before = leaves(&model, None);
        let mut inputs = Vec::new();
        let fake = batch.clone().map(&mut batch::Fake {
            device,
            path: batch::Path::default(),
            joined,
            found: |_, captured| inputs.push(captured),
        });
        progress.enter("the evaluation");
        let computing = computing(model, &options.precision, &running);
        let naming = Naming::begin();
        let (template, outputs) = outputs::take(forward(&computing, fake));
        let captures = Captures {
            with_gradients: before.clone(),
            updates: vec![None; running.len()],
            before,
            running,
            inputs,
            loss: None,
            outputs,
            activations: naming.asked(&options.activations),
            regions: Vec::new(),
            is_narrow: options.is_narrow(),
        };
        Ok((captures, template))
    })?;
    let (recording, template) = recording.split();
    Ok((Builder::new(recording, specs)?, template))
}
