//! What tells the process to end.

use crate::error::Error;

/// Comes when the process is told to end; told twice, it ends at once.
///
/// # Errors
/// If the system does not tell.
#[cfg(unix)]
pub(crate) fn end() -> Result<impl Future<Output = ()>, Error> {
    use tokio::signal::unix::{SignalKind, signal};
    let fault = |source| Error::System { what: "no signals", source };
    let (mut term, mut int) =
        (signal(SignalKind::terminate()).map_err(fault)?, signal(SignalKind::interrupt()).map_err(fault)?);
    let (sender, receiver) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        let mut next = async || {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
            }
        };
        next().await;
        // Where nobody listens any more, it is ending already.
        let _ = sender.send(());
        next().await;
        std::process::exit(130);
    });
    Ok(async move {
        let _ = receiver.await;
    })
}

/// Comes when Ctrl-C is pressed.
///
/// # Errors
/// None.
#[cfg(not(unix))]
pub(crate) fn end() -> Result<impl Future<Output = ()>, Error> {
    Ok(async {
        let _ = tokio::signal::ctrl_c().await;
    })
}
