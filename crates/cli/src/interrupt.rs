//! Ctrl-C: the work in hand ends in good order, and pressed again, the program.

use crate::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// From here on Ctrl-C sets the flag; where it is set already, the program ends.
pub fn catch(flag: &Arc<AtomicBool>) -> Result<(), Error> {
    let flag = flag.clone();
    let handler = move || {
        if flag.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
    };
    ctrlc::set_handler(handler).map_err(|e| Error::Input(format!("Ctrl-C cannot be handled: {e}")))
}
