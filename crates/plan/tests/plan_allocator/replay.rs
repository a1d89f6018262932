//! Runs a graph of one rank operation by operation, and reports the bytes of each.

use burn::tensor::{Bytes, DType, Shape, TensorData};
use burn_flex::Flex;
use burn_fsdp_kernels::FusedOperation;
use burn_fsdp_spmd::graph::{Graph, Role};
use burn_ir::{HandleKind, OperationIr, TensorId, TensorIr, TensorStatus};
use burn_router::{CustomOpRegistry, TensorInterpreter};

use crate::ALLOCATOR;

/// Returns for every node except drops: its index, its peak bytes above those between steps, and the bytes after it.
/// All steps except the last only create the tensors that a step leaves.
pub(crate) fn run(graph: &Graph, num_steps: usize) -> Vec<(usize, usize, usize)> {
    let mut interpreter = TensorInterpreter::with_custom_ops(Default::default(), kernels());
    let given = |interpreter: &mut TensorInterpreter<Flex>, is_input: bool| {
        for value in graph.values() {
            let is_chosen = matches!(value.role, Role::Input(_)) == is_input;
            if value.role.is_given() && is_chosen && !graph.constants().contains_key(&value.id) {
                let data = zeros(&value.shape, value.dtype);
                interpreter.register_tensor_data_id(value.id, data);
            }
        }
    };
    make_room(&mut interpreter, graph);
    given(&mut interpreter, false);
    for (id, data) in graph.constants() {
        interpreter.register_tensor_data_id(*id, data.as_ref().clone());
    }
    // Must not grow during the measurement.
    let mut measured = Vec::with_capacity(graph.nodes().len());
    for step in 0..num_steps {
        let at_rest = ALLOCATOR.live();
        given(&mut interpreter, true);
        for (index, node) in graph.nodes().iter().enumerate() {
            let operation = node.operation.clone();
            ALLOCATOR.reset_peak();
            interpreter.register_op(operation);
            if step + 1 == num_steps && !node.is_drop() {
                let above = |num_bytes: usize| num_bytes.saturating_sub(at_rest);
                measured.push((index, above(ALLOCATOR.peak()), above(ALLOCATOR.live())));
            }
        }
        finish(&mut interpreter, graph);
    }
    measured
}

/// Returns the kernels, as the interpreter calls them.
fn kernels() -> CustomOpRegistry<Flex> {
    let mut registry = CustomOpRegistry::new();
    for kernel in FusedOperation::ALL {
        registry.register(kernel.name(), move |handles, call, _| {
            let inputs = call.inputs.iter().map(|input| {
                match handles.get_handle(&input.id, &input.status) {
                    HandleKind::Float(tensor)
                    | HandleKind::Int(tensor)
                    | HandleKind::Bool(tensor) => tensor,
                    HandleKind::Quantized(_) => unreachable!("no kernel takes it"),
                }
            });
            let inputs = inputs.collect();
            for (output, tensor) in call.outputs.iter().zip(kernel.run(call, inputs)) {
                handles.register_handle(output.id, HandleKind::Float(tensor));
            }
        });
    }
    registry
}

/// Makes the interpreter's table of tensors far larger than the graph needs.
///
/// Removed entries leave tombstones in a hash table. Once there are too many, the table is rebuilt. The operation
/// that triggers this depends on the hash, which differs in each run. The table is rebuilt in place if there is
/// enough room, and otherwise in new memory, which would be attributed to that operation.
fn make_room(interpreter: &mut TensorInterpreter<Flex>, graph: &Graph) {
    let ids =
        (0..4 * graph.values().count() as u64).map(|index| TensorId::new(u64::MAX / 2 + index));
    for id in ids.clone() {
        interpreter.register_tensor_data_id(id, zeros(&[0], DType::F32));
    }
    ids.for_each(|id| free(interpreter, id));
}

fn free(interpreter: &mut TensorInterpreter<Flex>, id: TensorId) {
    let tensor = TensorIr {
        id,
        shape: Shape::from(vec![0]),
        status: TensorStatus::ReadWrite,
        dtype: DType::F32,
    };
    interpreter.register_op(OperationIr::Drop(tensor));
}

/// Feeds the results of the step back, and frees the remaining values.
fn finish(interpreter: &mut TensorInterpreter<Flex>, graph: &Graph) {
    let fresh = |index: usize| TensorId::new(u64::MAX - index as u64);
    for (index, update) in graph.updates().iter().enumerate() {
        interpreter.register_alias(fresh(index), update.from);
    }
    let ends = graph.updates().iter().map(|update| update.from);
    for id in ends.chain(graph.results()) {
        if !graph.is_given(id) {
            free(interpreter, id);
        }
    }
    for (index, update) in graph.updates().iter().enumerate() {
        interpreter.register_alias(update.into, fresh(index));
        free(interpreter, fresh(index));
    }
    for id in graph.inputs() {
        free(interpreter, *id);
    }
}

fn zeros(shape: &[usize], dtype: DType) -> TensorData {
    let num_bytes = shape.iter().product::<usize>() * dtype.size();
    let bytes = Bytes::from_bytes_vec(vec![0; num_bytes]);
    TensorData::from_bytes(bytes, shape.to_vec(), dtype)
}
