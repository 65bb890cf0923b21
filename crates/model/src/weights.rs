//! A model's weights. Optional parts exist where the file has their tensors.

use crate::config::Config;
use crate::timings::Phase;

/// All weights of a model.
pub struct Weights<M> {
    /// `[vocab_size, dim]`.
    pub tok_embd: Linear<M>,
    /// The layers.
    pub layers: Vec<Layer<M>>,
    /// Before the output, `[dim]`.
    pub output_norm: Norm,
    /// `[vocab_size, dim]`; `None` where the embedding serves, or nothing does.
    pub output: Option<Linear<M>>,
    /// Whether there is an output projection at all.
    pub has_head: bool,
}

/// One layer. A norm that is absent does nothing.
pub struct Layer<M> {
    /// Before attention, `[dim]`.
    pub attn_norm: Option<Norm>,
    /// Attention.
    pub attn: Attn<M>,
    /// After attention, `[dim]`.
    pub post_attn_norm: Option<Norm>,
    /// Before feed-forward, `[dim]`.
    pub ffn_norm: Option<Norm>,
    /// Feed-forward.
    pub ffn: Ffn<M>,
    /// After feed-forward, `[dim]`.
    pub post_ffn_norm: Option<Norm>,
}

/// The projections of attention.
pub struct Attn<M> {
    /// `[n_heads * head_dim, dim]`, rows in the order of halves.
    pub q: Linear<M>,
    /// `[n_kv_heads * head_dim, dim]`, rows in the order of halves.
    pub k: Linear<M>,
    /// `[n_kv_heads * head_dim, dim]`.
    pub v: Linear<M>,
    /// `[dim, n_heads * head_dim]`.
    pub o: Linear<M>,
    /// Of queries: `[head_dim]`, each head, or `[n_heads * head_dim]`, the whole row.
    pub q_norm: Option<Norm>,
    /// Of keys, alike.
    pub k_norm: Option<Norm>,
}

/// Feed-forward.
pub enum Ffn<M> {
    /// One gated layer.
    Dense(Dense<M>),
    /// A mixture of experts.
    Moe(Box<Moe<M>>),
}

impl<M> Ffn<M> {
    /// The mixture, if it is one.
    pub fn moe(&self) -> Option<&Moe<M>> {
        match self {
            Ffn::Moe(moe) => Some(moe),
            Ffn::Dense(_) => None,
        }
    }
}

/// `down(activation(gate(x)) * up(x))`.
pub struct Dense<M> {
    /// `[ffn_dim, dim]`.
    pub gate: Linear<M>,
    /// `[ffn_dim, dim]`.
    pub up: Linear<M>,
    /// `[dim, ffn_dim]`.
    pub down: Linear<M>,
}

/// A router and its experts.
pub struct Moe<M> {
    /// `[n_experts, dim]`.
    pub router: Linear<M>,
    /// Added to the scores when experts are chosen, `[n_experts]`.
    pub correction: Option<Vec<f32>>,
    /// The experts; none where they are read from files as they are needed.
    pub experts: Vec<Dense<M>>,
    /// The expert that every token has.
    pub shared: Option<Shared<M>>,
}

/// An expert that every token has.
pub struct Shared<M> {
    /// The sigmoid of this row times the input scales the output, `[1, dim]`; without it the output stays as it is.
    pub gate: Option<Linear<M>>,
    /// The expert.
    pub ffn: Dense<M>,
}

/// A projection.
pub struct Linear<M> {
    /// `[out, in]`.
    pub weight: M,
    /// `[out]`.
    pub bias: Option<Vec<f32>>,
    /// What the time of its products counts to.
    pub phase: Phase,
}

/// A root-mean-square norm.
pub struct Norm {
    /// Its weight; its length says what it spans.
    pub weight: Vec<f32>,
    /// Added to the mean square.
    pub eps: f32,
}

impl<M> Weights<M> {
    /// The output projection.
    pub fn head(&self) -> &Linear<M> {
        self.output.as_ref().unwrap_or(&self.tok_embd)
    }

    /// The sum over the matrices that one token reads of what `of` says of each.
    pub fn per_step(&self, config: &Config, of: &dyn Fn(&M) -> usize) -> usize {
        let dense = |f: &Dense<M>| of(&f.gate.weight) + of(&f.up.weight) + of(&f.down.weight);
        let layer = |layer: &Layer<M>| {
            let a = &layer.attn;
            let attn: usize = [&a.q, &a.k, &a.v, &a.o].iter().map(|l| of(&l.weight)).sum();
            attn + match &layer.ffn {
                Ffn::Dense(f) => dense(f),
                Ffn::Moe(m) => {
                    let used = config.moe.map_or(0, |moe| moe.routing.used);
                    let shared = m.shared.as_ref().map_or(0, |s| dense(&s.ffn));
                    of(&m.router.weight) + shared + m.experts.iter().take(used).map(dense).sum::<usize>()
                }
            }
        };
        let head = if self.has_head { of(&self.head().weight) } else { 0 };
        head + self.layers.iter().map(layer).sum::<usize>()
    }

    /// Every vector: norms, biases, a router's correction.
    pub fn each_vector(&self, f: &mut impl FnMut(&[f32])) {
        fn bias<M>(linear: &Linear<M>, f: &mut impl FnMut(&[f32])) {
            linear.bias.iter().for_each(|bias| f(bias));
        }
        fn dense<M>(d: &Dense<M>, f: &mut impl FnMut(&[f32])) {
            [&d.gate, &d.up, &d.down].into_iter().for_each(|linear| bias(linear, f));
        }
        for Layer { attn_norm, attn, post_attn_norm, ffn_norm, ffn, post_ffn_norm } in &self.layers {
            let norms = [attn_norm, post_attn_norm, ffn_norm, post_ffn_norm, &attn.q_norm, &attn.k_norm];
            norms.into_iter().flatten().for_each(|norm| f(&norm.weight));
            [&attn.q, &attn.k, &attn.v, &attn.o].into_iter().for_each(|linear| bias(linear, f));
            match ffn {
                Ffn::Dense(d) => dense(d, f),
                Ffn::Moe(m) => {
                    bias(&m.router, f);
                    m.correction.iter().for_each(|correction| f(correction));
                    m.experts.iter().chain(m.shared.as_ref().map(|shared| &shared.ffn)).for_each(|d| dense(d, f));
                }
            }
        }
        f(&self.output_norm.weight);
        self.output.iter().for_each(|output| bias(output, f));
    }

    /// Every matrix.
    pub fn each(&self, f: &mut impl FnMut(&M)) {
        fn dense<M>(d: &Dense<M>, f: &mut impl FnMut(&M)) {
            [&d.gate, &d.up, &d.down].into_iter().for_each(|l| f(&l.weight));
        }
        f(&self.tok_embd.weight);
        for Layer { attn, ffn, .. } in &self.layers {
            [&attn.q, &attn.k, &attn.v, &attn.o].into_iter().for_each(|l| f(&l.weight));
            match ffn {
                Ffn::Dense(d) => dense(d, f),
                Ffn::Moe(m) => {
                    f(&m.router.weight);
                    m.experts.iter().for_each(|e| dense(e, f));
                    if let Some(shared) = &m.shared {
                        shared.gate.iter().for_each(|gate| f(&gate.weight));
                        dense(&shared.ffn, f);
                    }
                }
            }
        }
        self.output.iter().for_each(|output| f(&output.weight));
    }

    /// The same weights with every matrix replaced.
    pub fn map<N>(self, f: &mut impl FnMut(M) -> N) -> Weights<N> {
        Weights {
            tok_embd: self.tok_embd.map(f),
            layers: self.layers.into_iter().map(|layer| layer.map(f)).collect(),
            output_norm: self.output_norm,
            output: self.output.map(|output| output.map(f)),
            has_head: self.has_head,
        }
    }
}

impl<M> Layer<M> {
    fn map<N>(self, f: &mut impl FnMut(M) -> N) -> Layer<N> {
        let Attn { q, k, v, o, q_norm, k_norm } = self.attn;
        Layer {
            attn_norm: self.attn_norm,
            attn: Attn { q: q.map(f), k: k.map(f), v: v.map(f), o: o.map(f), q_norm, k_norm },
            post_attn_norm: self.post_attn_norm,
            ffn_norm: self.ffn_norm,
            ffn: match self.ffn {
                Ffn::Dense(dense) => Ffn::Dense(dense.map(f)),
                Ffn::Moe(moe) => Ffn::Moe(Box::new(Moe {
                    router: moe.router.map(f),
                    correction: moe.correction,
                    experts: moe.experts.into_iter().map(|expert| expert.map(f)).collect(),
                    shared: moe.shared.map(|s| Shared { gate: s.gate.map(|gate| gate.map(f)), ffn: s.ffn.map(f) }),
                })),
            },
            post_ffn_norm: self.post_ffn_norm,
        }
    }
}

impl<M> Dense<M> {
    fn map<N>(self, f: &mut impl FnMut(M) -> N) -> Dense<N> {
        Dense { gate: self.gate.map(f), up: self.up.map(f), down: self.down.map(f) }
    }
}

impl<M> Linear<M> {
    fn map<N>(self, f: &mut impl FnMut(M) -> N) -> Linear<N> {
        Linear { weight: f(self.weight), bias: self.bias, phase: self.phase }
    }
}
