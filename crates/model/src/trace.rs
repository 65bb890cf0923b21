//! What happened when, in the form that Chrome (chrome://tracing) and Perfetto read: the Trace Event Format, complete
//! events (`"ph": "X"`) with times in microseconds.

use crate::timings::Phase;
use std::io::{self, Write};
use std::time::{Duration, Instant};

/// Laps and steps of a stopwatch, one by one, up to a number that bounds its memory; later ones are only counted.
#[derive(Clone, Debug)]
pub struct Trace {
    start: Instant,
    events: Vec<Event>,
    max: usize,
    dropped: u64,
}

#[derive(Clone, Copy, Debug)]
struct Event {
    what: What,
    /// Nanoseconds since the trace began.
    at: u64,
    /// Nanoseconds.
    time: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    Phase(Phase),
    Step { rows: u32, sequences: u32 },
}

impl Trace {
    /// Some hundred steps of a model of 30 layers, and 16 MiB.
    pub const MAX_EVENTS: usize = 1 << 19;

    /// A trace that begins now and keeps at most so many events, of 32 bytes each.
    pub fn new(max_events: usize) -> Trace {
        Trace { start: Instant::now(), events: Vec::new(), max: max_events, dropped: 0 }
    }

    /// Events that there was no room for.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Events that are kept.
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    pub(crate) fn phase(&mut self, phase: Phase, start: Instant, time: Duration) {
        let event = self.event(What::Phase(phase), start, time);
        // A phase of several laps is one event.
        if let Some(last) = self.events.last_mut().filter(|e| e.what == event.what && e.at + e.time == event.at) {
            last.time += event.time;
        } else {
            self.push(event);
        }
    }

    pub(crate) fn step(&mut self, rows: usize, sequences: usize, start: Instant, time: Duration) {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let event = self.event(What::Step { rows: count(rows), sequences: count(sequences) }, start, time);
        self.push(event);
    }

    fn event(&self, what: What, start: Instant, time: Duration) -> Event {
        let ns = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Event { what, at: ns(start.saturating_duration_since(self.start)), time: ns(time) }
    }

    fn push(&mut self, event: Event) {
        if self.events.len() < self.max {
            self.events.push(event);
        } else {
            self.dropped += 1;
        }
    }

    /// Writes it as JSON: steps on one track, phases on another, and how many events were dropped.
    ///
    /// # Errors
    /// As `out` has them.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(
            out,
            "{{\"displayTimeUnit\":\"ms\",\"otherData\":{{\"dropped_events\":{}}},\"traceEvents\":[",
            self.dropped
        )?;
        for (track, name) in [(1, "steps"), (2, "phases")] {
            let name = format!("\"ph\":\"M\",\"name\":\"thread_name\",\"args\":{{\"name\":\"{name}\"}}");
            writeln!(out, "{{\"pid\":1,\"tid\":{track},{name}}},")?;
        }
        for event in &self.events {
            let (at, time) = (event.at as f64 / 1e3, event.time as f64 / 1e3);
            let times = format!("\"ph\":\"X\",\"pid\":1,\"ts\":{at:.3},\"dur\":{time:.3}");
            match event.what {
                What::Phase(phase) => writeln!(out, "{{\"name\":\"{}\",\"tid\":2,{times}}},", phase.name())?,
                What::Step { rows, sequences } => {
                    let args = format!("\"args\":{{\"rows\":{rows},\"sequences\":{sequences}}}");
                    writeln!(out, "{{\"name\":\"step\",\"tid\":1,{times},{args}}},")?;
                }
            }
        }
        // A list has no comma at its end.
        writeln!(out, "{{\"pid\":1,\"ph\":\"M\",\"name\":\"process_name\",\"args\":{{\"name\":\"puna\"}}}}\n]}}")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::timings::Stopwatch;

    #[test]
    fn a_trace_is_json_and_bounded() {
        let mut watch = Stopwatch::new(Some(Trace::new(4)));
        watch.begin_step();
        for phase in [Phase::Norm, Phase::Qkv, Phase::Qkv, Phase::Ffn] {
            watch.lap(phase);
        }
        watch.end_step(7, 2);
        watch.lap(Phase::Head);
        watch.end_step(1, 1);
        let trace = watch.take_trace().unwrap();
        assert_eq!((trace.len(), trace.dropped()), (4, 2));
        let mut json = Vec::new();
        trace.write(&mut json).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&json).unwrap();
        assert_eq!(json["otherData"]["dropped_events"], 2);
        let events = json["traceEvents"].as_array().unwrap();
        let names: Vec<&str> = events.iter().filter(|e| e["ph"] == "X").map(|e| e["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["norm", "qkv", "ffn", "step"]);
        let step = events.iter().find(|e| e["name"] == "step").unwrap();
        assert_eq!((&step["args"]["rows"], &step["args"]["sequences"]), (&7.into(), &2.into()));
        for event in events.iter().filter(|e| e["tid"] == 2 && e["ph"] == "X") {
            let [at, time] = ["ts", "dur"].map(|key| event[key].as_f64().unwrap());
            let [start, wall] = ["ts", "dur"].map(|key| step[key].as_f64().unwrap());
            assert!(start <= at + 0.01 || event["name"] == "norm");
            assert!(at + time <= start + wall + 0.01);
        }
    }
}
