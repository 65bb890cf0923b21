//! Counts and times for Prometheus. Everything is an atomic number: writing takes no lock, and neither does reading,
//! however often gateways ask.

use puna::ExpertStats;
use puna::draft::{DraftStats, MAX_DRAFT};
use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{LazyLock, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Since when there have been no adapters, in seconds since 1970.
static START: LazyLock<f64> =
    LazyLock::new(|| SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64()));

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self, n: usize) {
        self.0.fetch_add(n as u64, Relaxed);
    }

    /// What somebody else counts.
    pub fn set(&self, n: u64) {
        self.0.store(n, Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Debug, Default)]
pub(crate) struct Gauge(AtomicU64);

impl Gauge {
    pub fn set(&self, x: f64) {
        self.0.store(x.to_bits(), Relaxed);
    }

    pub fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Relaxed))
    }
}

/// Bounds of times, in seconds.
const TIMES: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];

/// Bounds of counts.
const COUNTS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100000.0,
];

/// How numbers are distributed.
#[derive(Debug)]
pub(crate) struct Histogram {
    bounds: &'static [f64],
    /// One more than there are bounds.
    counts: Vec<AtomicU64>,
    /// Bits of the sum.
    sum: AtomicU64,
}

impl Histogram {
    fn new(bounds: &'static [f64]) -> Histogram {
        Histogram { bounds, counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(), sum: AtomicU64::new(0) }
    }

    pub fn observe(&self, x: f64) {
        let bucket = self.bounds.partition_point(|&bound| bound < x);
        self.counts[bucket].fetch_add(1, Relaxed);
        // Never fails: the function always gives a value.
        let _ = self.sum.fetch_update(Relaxed, Relaxed, |bits| Some((f64::from_bits(bits) + x).to_bits()));
    }

    pub fn time(&self, time: Duration) {
        self.observe(time.as_secs_f64());
    }

    fn write(&self, out: &mut String, name: &str, labels: &str) {
        let mut total = 0;
        for (i, count) in self.counts.iter().enumerate() {
            total += count.load(Relaxed);
            let bound = self.bounds.get(i).map_or("+Inf".to_owned(), f64::to_string);
            line(out, &format!("{name}_bucket"), &format!("{labels},le=\"{bound}\""), total);
        }
        line(out, &format!("{name}_sum"), labels, f64::from_bits(self.sum.load(Relaxed)));
        line(out, &format!("{name}_count"), labels, total);
    }
}

/// What is measured of one model.
#[derive(Debug)]
pub(crate) struct ModelMetrics {
    pub running: Gauge,
    pub waiting: Gauge,
    pub kv_usage: Gauge,
    pub kv_held: Gauge,
    pub kv_cached: Gauge,
    pub kv_limit: Gauge,
    /// Blocks that the cache has at most.
    pub blocks: Gauge,
    pub prompt_tokens: Counter,
    pub generated_tokens: Counter,
    pub cache_queries: Counter,
    pub cache_hits: Counter,
    pub preemptions: Counter,
    pub embedded_tokens: Counter,
    pub saved_bytes: Counter,
    pub loaded_bytes: Counter,
    pub drafts: Counter,
    pub drafted_tokens: Counter,
    pub accepted_tokens: Counter,
    /// By their place in the draft.
    pub accepted_at: [Counter; MAX_DRAFT],
    /// Of experts that are read from files, as are the next ones: bytes that they may take.
    pub expert_memory: Gauge,
    pub expert_hits: Counter,
    pub expert_misses: Counter,
    pub expert_prefetched: Counter,
    pub expert_evictions: Counter,
    pub expert_bytes: Counter,
    /// In nanoseconds.
    pub expert_stall: Counter,
    /// By reason: stop, length, abort, error.
    pub ended: [Counter; 4],
    pub first_token: Histogram,
    pub inter_token: Histogram,
    pub whole: Histogram,
    pub queue: Histogram,
    pub prefill: Histogram,
    pub decode: Histogram,
    pub inference: Histogram,
    pub prompt_len: Histogram,
    pub answer_len: Histogram,
    pub max_tokens: Histogram,
    pub answers: Histogram,
    pub step_rows: Histogram,
    /// How often each expert was chosen, by layer; empty without experts.
    pub experts: OnceLock<Vec<Vec<Counter>>>,
}

/// Reasons of [`ModelMetrics::ended`].
pub(crate) const REASONS: [&str; 4] = ["stop", "length", "abort", "error"];

impl Default for ModelMetrics {
    fn default() -> ModelMetrics {
        let (times, counts) = (|| Histogram::new(TIMES), || Histogram::new(COUNTS));
        ModelMetrics {
            running: Gauge::default(),
            waiting: Gauge::default(),
            kv_usage: Gauge::default(),
            kv_held: Gauge::default(),
            kv_cached: Gauge::default(),
            kv_limit: Gauge::default(),
            blocks: Gauge::default(),
            prompt_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            cache_queries: Counter::default(),
            cache_hits: Counter::default(),
            preemptions: Counter::default(),
            embedded_tokens: Counter::default(),
            saved_bytes: Counter::default(),
            loaded_bytes: Counter::default(),
            drafts: Counter::default(),
            drafted_tokens: Counter::default(),
            accepted_tokens: Counter::default(),
            accepted_at: Default::default(),
            expert_memory: Gauge::default(),
            expert_hits: Counter::default(),
            expert_misses: Counter::default(),
            expert_prefetched: Counter::default(),
            expert_evictions: Counter::default(),
            expert_bytes: Counter::default(),
            expert_stall: Counter::default(),
            ended: Default::default(),
            first_token: times(),
            inter_token: times(),
            whole: times(),
            queue: times(),
            prefill: times(),
            decode: times(),
            inference: times(),
            prompt_len: counts(),
            answer_len: counts(),
            max_tokens: counts(),
            answers: counts(),
            step_rows: counts(),
            experts: OnceLock::new(),
        }
    }
}

impl ModelMetrics {
    pub fn set_drafts(&self, stats: &DraftStats) {
        self.drafts.set(stats.drafts as u64);
        self.drafted_tokens.set(stats.drafted as u64);
        self.accepted_tokens.set(stats.accepted as u64);
        self.accepted_at.iter().zip(stats.accepted_at).for_each(|(counter, n)| counter.set(n as u64));
    }

    pub fn set_expert_reads(&self, stats: &ExpertStats) {
        self.expert_memory.set(stats.budget as f64);
        self.expert_hits.set(stats.hits);
        self.expert_misses.set(stats.misses);
        self.expert_prefetched.set(stats.prefetched);
        self.expert_evictions.set(stats.evictions);
        self.expert_bytes.set(stats.bytes_read);
        self.expert_stall.set(stats.stall.as_nanos() as u64);
    }
}

enum Value<'a> {
    Gauge(&'a Gauge),
    Counter(&'a Counter),
    /// Counted in nanoseconds.
    Seconds(&'a Counter),
    Histogram(&'a Histogram),
    Reasons(&'a [Counter; 4]),
    Places(&'a [Counter]),
}

/// A family of numbers: our name without prefix, vLLM's name where gateways and dashboards know one, what it is.
struct Family {
    name: &'static str,
    vllm: Option<&'static str>,
    help: &'static str,
    get: fn(&ModelMetrics) -> Value<'_>,
}

macro_rules! family {
    ($name:literal, $vllm:expr, $kind:ident $field:ident, $help:literal) => {
        Family { name: $name, vllm: $vllm, help: $help, get: |m| Value::$kind(&m.$field) }
    };
}

const FAMILIES: &[Family] = &[
    family!("requests_waiting", Some("num_requests_waiting"), Gauge waiting, "Requests that wait for their turn"),
    family!("requests_running", Some("num_requests_running"), Gauge running, "Answers that are worked on"),
    family!("kv_cache_usage", Some("kv_cache_usage_perc"), Gauge kv_usage,
        "Part of the KV cache that running answers hold, 0 to 1"),
    family!("kv_cache_held_bytes", None, Gauge kv_held, "Bytes of the KV cache that running answers hold"),
    family!("kv_cache_cached_bytes", None, Gauge kv_cached, "Bytes of the KV cache kept for prompts that begin alike"),
    family!("kv_cache_limit_bytes", None, Gauge kv_limit, "Most bytes of the KV cache"),
    family!("prompt_tokens_total", Some("prompt_tokens_total"), Counter prompt_tokens, "Tokens of prompts"),
    family!("generated_tokens_total", Some("generation_tokens_total"), Counter generated_tokens, "Tokens generated"),
    family!("embedded_tokens_total", None, Counter embedded_tokens, "Tokens of texts that were embedded"),
    family!("prefix_saved_bytes_total", None, Counter saved_bytes, "Bytes of named prefixes that went to their files"),
    family!("prefix_loaded_bytes_total", None, Counter loaded_bytes, "Bytes of named prefixes that came from their files"),
    family!("prefix_cache_queries_total", Some("prefix_cache_queries_total"), Counter cache_queries,
        "Tokens looked for in the cache"),
    family!("prefix_cache_hits_total", Some("prefix_cache_hits_total"), Counter cache_hits,
        "Tokens found in the cache"),
    family!("preemptions_total", Some("num_preemptions_total"), Counter preemptions,
        "How often an answer made room for another and was computed again"),
    family!("drafts_total", Some("spec_decode_num_drafts_total"), Counter drafts, "Drafts that were verified"),
    family!("drafted_tokens_total", Some("spec_decode_num_draft_tokens_total"), Counter drafted_tokens,
        "Tokens that were guessed"),
    family!("accepted_tokens_total", Some("spec_decode_num_accepted_tokens_total"), Counter accepted_tokens,
        "Tokens that were guessed and right"),
    family!("accepted_tokens_per_position_total", Some("spec_decode_num_accepted_tokens_per_pos_total"),
        Places accepted_at, "Tokens that were guessed and right, by their place in the draft"),
    family!("expert_memory_bytes", None, Gauge expert_memory,
        "Most bytes of experts in memory; 0 where all of them are"),
    family!("expert_hits_total", None, Counter expert_hits,
        "Experts that a layer wanted and that were in memory, once a step whatever its rows"),
    family!("expert_misses_total", None, Counter expert_misses,
        "Experts that a layer wanted and that were not in memory"),
    family!("expert_prefetches_total", None, Counter expert_prefetched,
        "Experts that were read before a layer wanted them"),
    family!("expert_evictions_total", None, Counter expert_evictions, "Experts that made room for others"),
    family!("expert_read_bytes_total", None, Counter expert_bytes, "Bytes of experts read from files"),
    family!("expert_stall_seconds_total", None, Seconds expert_stall,
        "Time that steps did nothing but wait for experts"),
    family!("answers_total", Some("request_success_total"), Reasons ended, "Answers that ended, by why"),
    family!("time_to_first_token_seconds", Some("time_to_first_token_seconds"), Histogram first_token,
        "From arrival to the first token"),
    family!("inter_token_latency_seconds", Some("inter_token_latency_seconds"), Histogram inter_token,
        "Between two tokens of an answer"),
    family!("request_latency_seconds", Some("e2e_request_latency_seconds"), Histogram whole,
        "From arrival to the end of an answer"),
    family!("request_queue_seconds", Some("request_queue_time_seconds"), Histogram queue,
        "From arrival to when work began"),
    family!("request_prompt_seconds", Some("request_prefill_time_seconds"), Histogram prefill,
        "From when work began to the first token"),
    family!("request_generate_seconds", Some("request_decode_time_seconds"), Histogram decode,
        "From the first token to the last"),
    family!("request_work_seconds", Some("request_inference_time_seconds"), Histogram inference,
        "From when work began to the last token"),
    family!("request_prompt_tokens", Some("request_prompt_tokens"), Histogram prompt_len, "Tokens of a prompt"),
    family!("request_generated_tokens", Some("request_generation_tokens"), Histogram answer_len,
        "Tokens of an answer"),
    family!("request_max_tokens", Some("request_params_max_tokens"), Histogram max_tokens,
        "Most tokens that a request wants"),
    family!("request_answers", Some("request_params_n"), Histogram answers, "Answers that a request wants"),
    family!("step_tokens", Some("iteration_tokens_total"), Histogram step_rows, "Tokens computed in a step"),
];

/// What is measured of the server.
#[derive(Debug, Default)]
pub(crate) struct HttpMetrics {
    /// By [`STATUSES`], and one for others.
    responses: [Counter; STATUSES.len() + 1],
    pub connections: Counter,
    pub closed: Counter,
}

const STATUSES: [u16; 12] = [200, 204, 400, 401, 403, 404, 405, 408, 413, 429, 500, 503];

impl HttpMetrics {
    pub fn response(&self, status: u16) {
        let at = STATUSES.iter().position(|s| *s == status).unwrap_or(STATUSES.len());
        self.responses[at].add(1);
    }
}

/// One line: a name, its labels, a number.
fn line(out: &mut String, name: &str, labels: &str, value: impl std::fmt::Display) {
    // Writing to a string does not fail.
    let _ = writeln!(out, "{name}{{{labels}}} {value}");
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}");
}

/// A label's value, with what would end it escaped.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

impl Family {
    fn write(&self, out: &mut String, name: &str, models: &[(&str, &ModelMetrics)]) {
        for (i, (model, metrics)) in models.iter().enumerate() {
            let value = (self.get)(metrics);
            if i == 0 {
                let kind = match value {
                    Value::Gauge(_) => "gauge",
                    Value::Counter(_) | Value::Seconds(_) | Value::Reasons(_) | Value::Places(_) => "counter",
                    Value::Histogram(_) => "histogram",
                };
                head(out, name, kind, self.help);
            }
            let labels = format!("model_name=\"{}\",engine=\"{i}\"", escaped(model));
            match value {
                Value::Gauge(gauge) => line(out, name, &labels, gauge.get()),
                Value::Counter(counter) => line(out, name, &labels, counter.get()),
                Value::Seconds(counter) => line(out, name, &labels, counter.get() as f64 / 1e9),
                Value::Histogram(histogram) => histogram.write(out, name, &labels),
                Value::Places(counters) => {
                    for (place, counter) in counters.iter().enumerate() {
                        line(out, name, &format!("{labels},position=\"{place}\""), counter.get());
                    }
                }
                Value::Reasons(counters) => {
                    for (reason, counter) in REASONS.iter().zip(counters) {
                        line(out, name, &format!("{labels},finished_reason=\"{reason}\""), counter.get());
                    }
                }
            }
        }
    }
}

/// All of it, in Prometheus' text format.
pub(crate) fn render(http: &HttpMetrics, models: &[(&str, &ModelMetrics)]) -> String {
    let mut out = String::with_capacity(32 << 10);
    for family in FAMILIES {
        family.write(&mut out, &format!("puna_{}", family.name), models);
        if let Some(name) = family.vllm {
            family.write(&mut out, &format!("vllm:{name}"), models);
        }
    }
    let name = "puna_expert_tokens_total";
    head(&mut out, name, "counter", "How often an expert was chosen for a token");
    for (i, (model, metrics)) in models.iter().enumerate() {
        let labels = format!("model_name=\"{}\",engine=\"{i}\"", escaped(model));
        for (layer, counters) in metrics.experts.get().into_iter().flatten().enumerate() {
            for (expert, counter) in counters.iter().enumerate() {
                line(&mut out, name, &format!("{labels},layer=\"{layer}\",expert=\"{expert}\""), counter.get());
            }
        }
    }
    let name = "vllm:cache_config_info";
    head(&mut out, name, "gauge", "How the KV cache is divided");
    for (i, (model, metrics)) in models.iter().enumerate() {
        let (model, blocks) = (escaped(model), metrics.blocks.get());
        let labels = format!("model_name=\"{model}\",engine=\"{i}\",block_size=\"32\",num_gpu_blocks=\"{blocks}\"");
        line(&mut out, name, &labels, 1);
    }
    let name = "vllm:lora_requests_info";
    head(&mut out, name, "gauge", "Adapters, of which there are none");
    line(&mut out, name, "max_lora=\"0\",running_lora_adapters=\"\",waiting_lora_adapters=\"\"", *START);
    let name = "puna_http_responses_total";
    head(&mut out, name, "counter", "Responses, by status");
    for (i, counter) in http.responses.iter().enumerate() {
        let status = STATUSES.get(i).map_or("other".to_owned(), u16::to_string);
        line(&mut out, name, &format!("status=\"{status}\""), counter.get());
    }
    let name = "puna_http_connections";
    head(&mut out, name, "gauge", "Open connections");
    let _ = writeln!(out, "{name} {}", http.connections.get().saturating_sub(http.closed.get()));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_whole() {
        let metrics = ModelMetrics::default();
        metrics.kv_usage.set(0.25);
        metrics.ended[1].add(3);
        metrics.first_token.observe(0.02);
        metrics.first_token.observe(99999.0);
        let text = render(&HttpMetrics::default(), &[("a \"b\"", &metrics)]);
        let labels = "model_name=\"a \\\"b\\\"\",engine=\"0\"";
        for expected in [
            format!("puna_kv_cache_usage{{{labels}}} 0.25"),
            format!("vllm:kv_cache_usage_perc{{{labels}}} 0.25"),
            format!("vllm:request_success_total{{{labels},finished_reason=\"length\"}} 3"),
            format!("vllm:time_to_first_token_seconds_bucket{{{labels},le=\"0.01\"}} 0"),
            format!("vllm:time_to_first_token_seconds_bucket{{{labels},le=\"0.025\"}} 1"),
            format!("vllm:time_to_first_token_seconds_bucket{{{labels},le=\"+Inf\"}} 2"),
            format!("vllm:time_to_first_token_seconds_sum{{{labels}}} 99999.02"),
            format!("vllm:time_to_first_token_seconds_count{{{labels}}} 2"),
        ] {
            assert!(text.lines().any(|line| line == expected), "{expected} is not in\n{text}");
        }
        // Every series follows the head of its family, which stands there once.
        let heads: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("# TYPE ")?.split(' ').next()).collect();
        let mut unique = heads.clone();
        unique.sort_unstable();
        unique.dedup();
        assert_eq!(unique.len(), heads.len());
    }
}
