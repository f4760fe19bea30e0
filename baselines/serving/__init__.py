"""Trained models in use: rankings of programs, and SavedModels."""

from baselines.serving.ranking import rank
from baselines.serving.ranking import Ranker
from baselines.serving.ranking import Ranking
from baselines.serving.saved_model import arrays_of

__all__ = ['Ranker', 'Ranking', 'arrays_of', 'rank']
