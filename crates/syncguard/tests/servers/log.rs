//! Records what is logged.

use std::fmt::Write as _;
use std::sync::{Arc, Mutex};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// A subscriber that records every `tracing` event with its level, and the fields of spans.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<String>>);

impl Log {
    /// Takes what was logged since the last call.
    pub(crate) fn take(&self) -> String {
        std::mem::take(&mut *self.0.lock().expect("no panic inside"))
    }

    fn write(&self, write: impl FnOnce(&mut Line<'_>)) {
        write(&mut Line(&mut self.0.lock().expect("no panic inside")));
    }
}

impl Subscriber for Log {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.write(|line| span.record(line));
        Id::from_u64(1)
    }

    fn record(&self, _span: &Id, values: &Record<'_>) {
        self.write(|line| values.record(line));
    }

    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}

    fn event(&self, event: &Event<'_>) {
        self.write(|line| {
            write!(line.0, "\n{} ", event.metadata().level()).expect("writing to a string");
            event.record(line);
        });
    }

    fn enter(&self, _span: &Id) {}

    fn exit(&self, _span: &Id) {}
}

struct Line<'a>(&'a mut String);

impl Visit for Line<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        write!(self.0, "{field}={value:?} ").expect("writing to a string");
    }
}
