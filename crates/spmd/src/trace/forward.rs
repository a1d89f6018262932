//! The trace of an evaluation: a module's forward without autodiff.

use burn::module::Module;
use burn::tensor::Device;
use burn_fsdp_tensors::Batch;

use super::activation::Naming;
use super::batch::{self, JoinedShape, specs_of};
use super::builder::{Builder, Captures};
use super::capture::record_with;
use super::module::{computing, leaves, off_tape, running, with_fakes, with_marks};
use super::types::by_types;
use super::{TraceOptions, outputs};
use crate::error::Error;
use crate::graph::Graph;

/// Traces `forward` on the module that `init` creates, as Burn runs it for inference: no gradients, no dropout,
/// unchanged running statistics. Also returns the result of `forward`, with small tensors as placeholders.
///
/// Parameters and buffers have the same ids as in every graph of the model. All other values have ids that no step
/// uses.
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
    // The builder rejects a narrow trace that would lose bits, and that error is returned.
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
        // The model is created without autodiff, including all tensors that are not parameters.
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
