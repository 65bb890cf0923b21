//! A warm decode step makes no system call, on any thread.
//!
//! The test runs itself again as a child, whose every thread it traces: each system call stops its thread, and is
//! counted for the step that the child is in, which is read from the child's memory. The model's step on one thread must
//! make none at all. Two calls are excused, and then the test wants many steps in a row without any:
//!
//! - on several threads, waking one and waiting for one: where other programs take the processor from a thread for
//!   longer than the others spin, these park;
//! - in the engine, the allocator's own for a larger heap: what it keeps of a sequence grows now and then.

#![allow(clippy::unwrap_used)]
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

mod support;

use nix::errno::Errno;
use nix::libc::{SYS_brk, SYS_futex, SYS_getppid, SYS_mprotect, SYS_sched_yield, c_long};
use nix::sys::ptrace::{self, Options};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, gettid};
use puna::{Engine, EngineOptions, KvType, ModelFiles};
use puna_model::{Batch, Model, Outputs};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStderr, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Set in the child.
const CHILD: &str = "PUNA_SYSCALLS_CHILD";

/// Models and threads. Each is decoded by the model alone and by the engine.
const CASES: [(&str, usize); 5] =
    [("llama-gqa", 1), ("mixtral-moe", 1), ("mistral-swa", 1), ("llama-gqa", 2), ("mixtral-moe", 2)];
const BY: [&str; 2] = ["the model", "the engine"];

/// Steps of a sequence, and sequences one after the other in the same blocks.
const LEN: usize = 200;
const SEQUENCES: usize = 10;

/// Steps in a row without any call that there must be.
const IN_A_ROW: usize = 50;

/// The step of the child, counted through all cases; 0 between them.
static STEP: AtomicUsize = AtomicUsize::new(0);

/// A step in which two threads make one call each: whether calls are seen at all.
const CONTROL: usize = usize::MAX;

#[test]
fn a_warm_step_makes_no_system_call() {
    if std::env::var_os(CHILD).is_some() {
        return child();
    }
    let Some(calls) = traced() else { return eprintln!("skipped: this system does not allow to trace a child") };
    assert_eq!(calls[&CONTROL].iter().filter(|&&call| call == SYS_getppid).count(), 2, "the calls of two threads");
    let per_case = LEN * SEQUENCES;
    let cases = CASES.into_iter().flat_map(|case| BY.map(|by| (case, by)));
    for (i, ((name, threads), by)) in cases.enumerate() {
        let what = format!("{name} by {by}, {threads} threads");
        let excused = |call: &c_long| {
            threads > 1 && [SYS_futex, SYS_sched_yield].contains(call)
                || by == "the engine" && [SYS_brk, SYS_mprotect].contains(call)
        };
        let (mut row, mut longest) = (0, 0);
        for step in i * per_case + 1..=(i + 1) * per_case {
            let calls = calls.get(&step).map_or(&[][..], Vec::as_slice);
            assert!(calls.iter().all(excused), "{what}: system calls {calls:?} in step {}", step - i * per_case);
            row = if calls.is_empty() { row + 1 } else { 0 };
            longest = longest.max(row);
        }
        println!("{what}: {longest} of {per_case} steps in a row without a system call");
        assert!(longest >= IN_A_ROW, "{what}: at most {longest} steps in a row");
    }
}

/// Says where [`STEP`] is, waits to be traced, and decodes.
fn child() {
    eprintln!("{}", STEP.as_ptr() as usize);
    std::io::stdin().read_exact(&mut [0]).unwrap();
    STEP.store(CONTROL, Ordering::SeqCst);
    let _ = std::os::unix::process::parent_id();
    std::thread::spawn(std::os::unix::process::parent_id).join().unwrap();
    STEP.store(0, Ordering::SeqCst);
    let mut count = 0;
    for (name, threads) in CASES {
        by_the_model(name, threads, &mut count);
        by_the_engine(name, threads, &mut count);
    }
}

/// The first sequence makes what the others use again.
fn by_the_model(name: &str, threads: usize, count: &mut usize) {
    let files = ModelFiles::open(support::model(name)).unwrap();
    let options = support::options(threads, 512).load;
    let mut model = Model::load(files.checkpoint(), &options, &mut |_, _| {}).unwrap();
    let mut kv = model.kv_cache(KvType::F16);
    all_others_sleep();
    let mut batch = Batch::default();
    for sequence in 0..=SEQUENCES {
        let seq = kv.add();
        for position in 0..LEN {
            begin(sequence, count);
            batch.clear();
            batch.push(seq, position, &[3 + position as u32], Outputs::Last);
            model.forward(&batch, &mut kv).unwrap();
        }
        STEP.store(0, Ordering::SeqCst);
        kv.remove(seq);
    }
}

fn by_the_engine(name: &str, threads: usize, count: &mut usize) {
    // Room for one sequence: when it is full, blocks go round.
    let options = EngineOptions { ctx: Some(256), kv_bytes: Some(1 << 17), ..support::options(threads, 512) };
    let mut engine = Engine::load(support::model(name), &options, &mut |_, _| {}).unwrap();
    all_others_sleep();
    for sequence in 0..=SEQUENCES {
        engine.add(support::request(support::prompt(1, sequence as u32), &support::greedy(), LEN + 1)).unwrap();
        // The prompt, and the answer's first token.
        engine.step().unwrap();
        for _ in 0..LEN {
            begin(sequence, count);
            engine.step().unwrap();
        }
        STEP.store(0, Ordering::SeqCst);
        assert!(engine.is_idle());
    }
}

/// Waits until every other thread does: one that has only just been made still has calls of its own to make.
fn all_others_sleep() {
    let sleeps = |task: std::io::Result<std::fs::DirEntry>| {
        let task = task.unwrap();
        let is_this = task.file_name() == gettid().to_string().as_str();
        // One that has ended meanwhile has no file.
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        is_this || stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('S'))
    };
    while !std::fs::read_dir("/proc/self/task").unwrap().all(sleeps) {
        std::thread::yield_now();
    }
}

fn begin(sequence: usize, count: &mut usize) {
    if sequence > 0 {
        *count += 1;
        STEP.store(*count, Ordering::SeqCst);
    }
}

/// System calls of the child's steps; `None` where it cannot be traced.
#[allow(clippy::zombie_processes)] // Tracing ends when the child has.
fn traced() -> Option<BTreeMap<usize, Vec<c_long>>> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_warm_step_makes_no_system_call", "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (stdin, stderr) = (child.stdin.take().unwrap(), child.stderr.take().unwrap());
    let calls = trace(&child, stdin, stderr);
    if calls.is_err() {
        // It may have ended.
        let _ = child.kill();
        let _ = child.wait();
    }
    match calls {
        Ok(calls) => Some(calls),
        Err(Errno::EPERM | Errno::ENOSYS) => None,
        Err(e) => panic!("tracing: {e}"),
    }
}

fn trace(child: &Child, mut stdin: ChildStdin, stderr: ChildStderr) -> Result<BTreeMap<usize, Vec<c_long>>, Errno> {
    let main = Pid::from_raw(child.id() as i32);
    let mut address = String::new();
    let mut stderr = BufReader::new(stderr);
    stderr.read_line(&mut address).unwrap();
    let address = address.trim().parse::<usize>().unwrap();
    let options = Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_TRACECLONE | Options::PTRACE_O_EXITKILL;
    for task in std::fs::read_dir(format!("/proc/{main}/task")).unwrap() {
        let task = Pid::from_raw(task.unwrap().file_name().to_str().unwrap().parse().unwrap());
        ptrace::seize(task, options)?;
        ptrace::interrupt(task)?;
    }
    stdin.write_all(b"!").unwrap();
    let mut calls = BTreeMap::<usize, Vec<c_long>>::new();
    loop {
        // A thread that has ended meanwhile cannot go on.
        let go_on =
            |pid, signal| ptrace::syscall(pid, signal).or_else(|e| if e == Errno::ESRCH { Ok(()) } else { Err(e) });
        match waitpid(None, Some(WaitPidFlag::__WALL))? {
            WaitStatus::PtraceSyscall(pid) => {
                let registers = ptrace::getregs(pid)?;
                let step = ptrace::read(pid, address as *mut _)? as usize;
                // On the way in there is no result yet.
                if registers.rax as i64 == -(Errno::ENOSYS as i64) && step > 0 {
                    calls.entry(step).or_default().push(registers.orig_rax as c_long);
                }
                go_on(pid, None)?;
            }
            WaitStatus::Stopped(pid, signal) => go_on(pid, Some(signal))?,
            WaitStatus::PtraceEvent(pid, ..) => go_on(pid, None)?,
            WaitStatus::Exited(pid, code) if pid == main => {
                let mut said = String::new();
                stderr.read_to_string(&mut said).unwrap();
                assert_eq!(code, 0, "the child failed: {said}");
                return Ok(calls);
            }
            WaitStatus::Signaled(pid, signal, _) if pid == main => panic!("the child ended by {signal:?}"),
            _ => {}
        }
    }
}
