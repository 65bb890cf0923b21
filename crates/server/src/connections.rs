//! Connections: how many there may be, and whose turn it is in each.
//!
//! A connection where the client is to speak is of no use to anybody: it gives up its place where all are taken, the one
//! that has been silent for longest first. One that waits for an answer, or reads one, keeps its place.

use axum::body::Bytes;
use http_body::{Body, Frame, SizeHint};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// How often it is asked whether one of many busy connections has become silent.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// All connections.
pub(crate) struct Connections {
    room: Arc<Semaphore>,
    open: Mutex<HashMap<SocketAddr, Arc<Turn>>>,
}

/// Whose turn it is in a connection.
pub(crate) struct Turn {
    /// Since when it is the client's; `None` while it is the server's.
    silent: Mutex<Option<Instant>>,
    unwanted: Notify,
}

/// A connection's place among all; it is free when this is dropped.
pub(crate) struct Place {
    connections: Arc<Connections>,
    peer: SocketAddr,
    pub turn: Arc<Turn>,
    _permit: OwnedSemaphorePermit,
}

impl Connections {
    /// Room for so many.
    pub fn new(most: usize) -> Connections {
        let room = Arc::new(Semaphore::new(most.clamp(1, Semaphore::MAX_PERMITS)));
        Connections { room, open: Mutex::default() }
    }

    fn open(&self) -> MutexGuard<'_, HashMap<SocketAddr, Arc<Turn>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for who speaks from `peer`, when there is one. It is the client's turn.
    pub async fn place(self: &Arc<Self>, peer: SocketAddr) -> Place {
        let permit = loop {
            if let Ok(permit) = self.room.clone().try_acquire_owned() {
                break permit;
            }
            self.end_one();
            if let Ok(Ok(permit)) = tokio::time::timeout(LOOK_AGAIN, self.room.clone().acquire_owned()).await {
                break permit;
            }
        };
        let turn = Arc::new(Turn { silent: Mutex::new(Some(Instant::now())), unwanted: Notify::new() });
        self.open().insert(peer, turn.clone());
        Place { connections: self.clone(), peer, turn, _permit: permit }
    }

    /// Ends the connection that has been silent for longest, if there is one.
    pub fn end_one(&self) {
        let open = self.open();
        let silent = open.values().filter_map(|turn| Some((turn.silent()?, turn)));
        if let Some((_, turn)) = silent.min_by_key(|(since, _)| *since) {
            turn.unwanted.notify_one();
        }
    }

    /// Ends all that have been silent for so long.
    pub fn end_silent(&self, time: Duration) {
        let open = self.open();
        let silent = open.values().filter(|turn| turn.silent().is_some_and(|since| since.elapsed() >= time));
        silent.for_each(|turn| turn.unwanted.notify_one());
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.connections.open();
        // A port can be in use again by now.
        if open.get(&self.peer).is_some_and(|turn| Arc::ptr_eq(turn, &self.turn)) {
            open.remove(&self.peer);
        }
    }
}

impl Turn {
    fn silent(&self) -> Option<Instant> {
        *self.silent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, silent: Option<Instant>) {
        *self.silent.lock().unwrap_or_else(PoisonError::into_inner) = silent;
    }

    /// Comes when the connection is to end.
    pub async fn unwanted(&self) {
        self.unwanted.notified().await;
    }

    /// A request's body, at whose end it is the server's turn.
    pub fn question<B: Body>(self: &Arc<Self>, body: B) -> Question<B> {
        if body.is_end_stream() {
            self.set(None);
        }
        Question { body, turn: self.clone() }
    }

    /// A response's body, after which it is the client's turn.
    pub fn answer<B>(self: &Arc<Self>, body: B) -> Answer<B> {
        Answer { body, turn: self.clone() }
    }
}

pub(crate) struct Question<B> {
    body: B,
    turn: Arc<Turn>,
}

impl<B: Body<Data = Bytes> + Unpin> Body for Question<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if matches!(polled, Poll::Ready(None)) || self.body.is_end_stream() {
            self.turn.set(None);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

pub(crate) struct Answer<B> {
    body: B,
    turn: Arc<Turn>,
}

impl<B: Body<Data = Bytes> + Unpin> Body for Answer<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl<B> Drop for Answer<B> {
    fn drop(&mut self) {
        self.turn.set(Some(Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use axum::body::Body;
    use http_body::Body as _;
    use http_body_util::BodyExt;

    fn peer(port: u16) -> SocketAddr {
        ([127, 0, 0, 1], port).into()
    }

    fn run(future: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future);
    }

    #[test]
    fn who_is_silent_for_longest_makes_room() {
        run(async {
            let connections = Arc::new(Connections::new(3));
            let (first, second, third) =
                (connections.place(peer(1)).await, connections.place(peer(2)).await, connections.place(peer(3)).await);
            // The first one has asked, the second is still asking.
            assert!(first.turn.question(Body::from("x")).collect().await.is_ok());
            let _half = second.turn.question(Body::from("x"));
            let waiting = tokio::spawn({
                let connections = connections.clone();
                async move { connections.place(peer(4)).await.peer }
            });
            second.turn.unwanted().await;
            drop(second);
            assert_eq!(waiting.await.unwrap(), peer(4));
            drop(third);
            assert!(connections.open().contains_key(&peer(1)) && connections.open().len() == 1);
        });
    }

    #[test]
    fn whose_turn_it_is() {
        run(async {
            let connections = Arc::new(Connections::new(1));
            let place = connections.place(peer(1)).await;
            let is_silent = || place.turn.silent().is_some();
            assert!(is_silent());
            let empty = place.turn.question(Body::empty());
            assert!(!is_silent() && empty.is_end_stream());
            let answer = place.turn.answer(Body::from("x"));
            assert!(!is_silent() && answer.size_hint().exact() == Some(1));
            drop(answer);
            assert!(is_silent());
            let question = place.turn.question(Body::from("x"));
            assert!(is_silent() && question.size_hint().exact() == Some(1));
            assert_eq!(question.collect().await.unwrap().to_bytes(), "x");
            assert!(!is_silent());
        });
    }
}
