//! The few messages of TensorBoard's `event.proto` and `summary.proto` that scalars need, encoded as protocol buffers.

/// The version of the format, in the first event of each file.
const FILE_VERSION: &str = "brain.Event:2";
/// `SessionLog.SessionStatus.START`.
const START: u64 = 1;

/// Returns the first event of a file.
pub(crate) fn version(wall_time: f64) -> Vec<u8> {
    let mut event = event(wall_time, 0);
    event.bytes(3, FILE_VERSION.as_bytes());
    event.0
}

/// Returns the event that a run starts at `step`. TensorBoard drops earlier events of this step and later ones.
pub(crate) fn start(wall_time: f64, step: u64) -> Vec<u8> {
    let mut log = Message::default();
    log.number(1, START);
    let mut event = event(wall_time, step);
    event.bytes(7, &log.0);
    event.0
}

/// Returns an event with the values of a step, each with its tag.
pub(crate) fn scalars(wall_time: f64, step: u64, values: &[(&str, f64)]) -> Vec<u8> {
    let mut summary = Message::default();
    for (tag, value) in values {
        let mut scalar = Message::default();
        scalar.bytes(1, tag.as_bytes());
        scalar.float(2, *value as f32);
        summary.bytes(1, &scalar.0);
    }
    let mut event = event(wall_time, step);
    event.bytes(5, &summary.0);
    event.0
}

fn event(wall_time: f64, step: u64) -> Message {
    let mut event = Message::default();
    event.double(1, wall_time);
    event.number(2, step);
    event
}

/// The bytes of a message. The methods append a field with its number in the definition of the message.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn number(&mut self, field: u64, value: u64) {
        self.varint(field << 3);
        self.varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.varint(field << 3 | 1);
        self.0.extend(value.to_le_bytes());
    }

    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.varint(field << 3 | 2);
        self.varint(value.len() as u64);
        self.0.extend(value);
    }

    fn float(&mut self, field: u64, value: f32) {
        self.varint(field << 3 | 5);
        self.0.extend(value.to_le_bytes());
    }

    /// Appends a number in groups of seven bits, the lowest first.
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}
